"""What this package was built with: nothing of its own, so versions are those at run time."""

version, git_hash, git_branch = "0.19.8", "infinity", "infinity"
torch_info = {
    "version": "0.0",
    "bf16_support": True,
    "cuda_version": "0.0",
    "nccl_version": "0.0",
    "hip_version": "0.0",
}
