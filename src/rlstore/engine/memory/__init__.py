"""Where tensors come from: RAM, shared memory, mapped files, devices."""
