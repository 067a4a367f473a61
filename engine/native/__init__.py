"""What lies between the matrix products of a step, in C for a CPU: optional, with the same results as torch's operators."""
