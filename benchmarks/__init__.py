"""Speed of rlstore beside other buffers: one file per workload, all contenders interleaved in one process."""
