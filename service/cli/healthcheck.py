"""`python -m service.cli.healthcheck`: whether the service of this container is ready, for a container engine that asks by command.

Host and port come from the environment alone, as the service's own do in the image, so that a question costs no loading of settings.
"""

import os
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping

TIMEOUT_SECONDS = 5.0
_LOOPBACK = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}


def health_url(environment: Mapping[str, str]) -> str:
    """`/health` of the service that was started with these variables; one that listens everywhere is asked on the loopback address."""
    host = environment.get("STRATA_HOST", "")
    host = _LOOPBACK.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{environment.get('STRATA_PORT') or 8000}/health"


def main() -> int:
    """0 where the service answers that it is ready, else 1 with one line that says what is wrong."""
    url = health_url(os.environ)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy's loopback address isn't this one
    try:
        with opener.open(url, timeout=TIMEOUT_SECONDS):
            return 0
    except urllib.error.HTTPError as error:
        print(f"{url}: {error.code} {error.reason}")
    except OSError as error:
        print(f"{url}: {error}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
