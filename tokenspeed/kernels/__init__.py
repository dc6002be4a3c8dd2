"""One file an op: reference, kernels, launcher, fake, registration."""
