"""The workloads that are measured, each a function from the run to what it gave."""
