"""The table of environment variables that set configuration, and the only function that reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Variable → dotted configuration key. The names are common in PyTorch, Kubeflow and Hugging Face.
CONFIG_VARIABLES: dict[str, str] = {
    "EPOCHS": "trainer.num_train_epochs",
    "BATCH_SIZE": "trainer.per_device_train_batch_size",
    "LEARNING_RATE": "trainer.learning_rate",
    "OUTPUT_DIR": "output_dir",
    "AIM_REPO": "tracking.aim_repo",
    "MODEL_NAME": "model.name_or_path",
    "MASTER_ADDR": "launch.master_addr",
    "MASTER_PORT": "launch.master_port",
    "WORLD_SIZE": "launch.world_size",
    "RANK": "launch.node_rank",
    # AWS Batch sets these in multi-node parallel jobs, except the last one on the main node.
    "AWS_BATCH_JOB_NUM_NODES": "launch.nnodes",
    "AWS_BATCH_JOB_NODE_INDEX": "launch.node_rank",
    "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "launch.master_addr",
    # torchrun's own names, which Kubeflow's Trainer sets; they take precedence over those above.
    "PET_MASTER_ADDR": "launch.master_addr",
    "PET_MASTER_PORT": "launch.master_port",
    "PET_NNODES": "launch.nnodes",
    "PET_NPROC_PER_NODE": "launch.nproc_per_node",
    "PET_NODE_RANK": "launch.node_rank",
    "PET_RDZV_BACKEND": "launch.rdzv_backend",
    "PET_RDZV_ENDPOINT": "launch.rdzv_endpoint",
}
# The variables that torchrun sets for each rank.
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# All other variables reach the ranks unchanged: NCCL_*, TORCH_*, CUDA_*, HF_*, OMP_NUM_THREADS, GLOO_SOCKET_IFNAME.


def settings_from_environment(environment: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    """Return {dotted key: (text value, name of the variable)} of the variables that are set and not empty."""
    return {
        key: (environment[variable], variable)
        for variable, key in CONFIG_VARIABLES.items()
        if environment.get(variable, "") != ""
    }
