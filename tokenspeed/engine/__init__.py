"""The engine: scheduler, worker, sampler, and the process around them."""
