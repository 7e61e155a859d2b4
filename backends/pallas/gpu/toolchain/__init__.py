"""What compiles and interprets the kernels for GPUs on machines without one."""
