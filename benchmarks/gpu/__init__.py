"""The parts of `python -m benchmarks.gpu_check`: they need the engine and torch and nothing else, to run where little is installed."""
