"""What bounds a kernel: a device's counters and times, the roofline of the spec and the compiler's report, each fact
with its source."""
