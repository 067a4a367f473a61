"""The version of the installed distribution."""

from importlib.metadata import PackageNotFoundError, version


def strata_version() -> str:
    try:
        return version("strata-server")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "0+unknown"
