"""What limits a kernel: counters and times of the device, the roofline of the spec and the compiler's report. Each fact
has its source."""
