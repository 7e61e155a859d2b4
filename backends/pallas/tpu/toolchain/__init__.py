"""What compiles and simulates the kernels for TPUs on machines without one."""
