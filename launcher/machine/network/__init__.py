"""Networks of this machine: interfaces, RDMA cards, and what NCCL talks over."""
