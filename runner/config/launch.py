"""The section `launch` of the configuration: processes, nodes, and where they meet."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


def _torchruns_auto(value: Any) -> Any:
    """Treat `gpu` and `cpu`, which torchrun also accepts and Kubeflow sets, like `auto`."""
    return "auto" if value in ("gpu", "cpu") else value


def split_nnodes(text: str) -> tuple[int, int] | None:
    """Return the smallest and the largest number of nodes that torchrun's N or MIN:MAX names; None if it is neither."""
    smallest, colon, largest = text.partition(":")
    if not (smallest.isdecimal() and (largest.isdecimal() or not colon)):
        return None
    return int(smallest), int(largest or smallest)


class Section(BaseModel):
    """A section of the configuration; unknown keys are errors, and attribute docstrings describe the keys."""

    model_config = ConfigDict(extra="forbid", validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False)


class LaunchConfig(Section):
    """Processes and nodes, named as in torchrun."""

    nproc_per_node: Annotated[Literal["auto"] | int, BeforeValidator(_torchruns_auto)] = "auto"
    """Number of ranks on this node. `auto` starts one per GPU, or 2 without GPUs."""
    nnodes: int = Field(default=1, ge=1)
    """Number of nodes; the largest number if `min_nodes` is set."""
    min_nodes: Annotated[int, Field(ge=1)] | None = Field(default=None, examples=[2])
    """Smallest number of nodes with which training continues when others are lost, as MIN in torchrun's `--nnodes
    MIN:MAX`. Without it `nnodes`, so that every loss stops all nodes until that node is back. Batch and learning rate
    are those of `nnodes` nodes, however many there are."""
    last_call_s: float = Field(default=30.0, ge=0)
    """Seconds that a start with `min_nodes` waits for further nodes once there are enough."""
    grow_interval_s: float = Field(default=300.0, ge=0)
    """Seconds from one change of the nodes to the admission of further ones: each costs a pause of all nodes."""
    evict_slow_nodes: bool = False
    """Whether a run with `min_nodes` continues without a node whose ranks compute at least 1.3 times as long as the
    median rank, if enough nodes are left; its machine is then excluded as one whose hardware failed
    (`restart.exclude_hours`). The leader is never left out. Without it slow ranks are only reported."""
    check_gpus: bool = True
    """Whether each node of several computes and stores known values on its GPUs, and adds up over all of them, before
    it takes part, while the ranks' libraries load. A node whose GPUs fail exits with 80, and its machine is excluded
    (`restart.exclude_hours`)."""
    node_rank: int = Field(default=0, ge=0)
    """Rank of this node, from 0. In a PyTorchJob the variable RANK sets it."""
    world_size: int | None = Field(default=None, ge=1, examples=[16])
    """Number of ranks on all nodes (variable WORLD_SIZE). Determines `nnodes` if that is 1."""
    rdzv_endpoint: str | None = Field(default=None, examples=["node0:29500"])
    """Rendezvous endpoint of the nodes, host:port. Without it `master_addr`:`master_port`, or a free local port on one
    node. With `etcd-v2` that of the etcd server."""
    rdzv_backend: Literal["c10d", "etcd-v2"] = "c10d"
    """How the ranks of several nodes meet, as in torchrun. `c10d` needs nothing: the leader keeps the store.
    `etcd-v2` uses an etcd server (3.4 or 3.5 with `--enable-v2`) and the package python-etcd; the runners themselves
    still communicate with the leader, at `master_addr`:`master_port` + 1."""
    master_addr: str | None = Field(default=None, examples=["node0"])
    """Host of the rendezvous on several nodes, if `rdzv_endpoint` is not set or is that of an etcd server."""
    master_port: int = Field(default=29500, ge=1, le=65535)
    """Port of the rendezvous on several nodes, if `rdzv_endpoint` is not set."""
    peer_port: int | None = Field(default=None, ge=1, le=65535, examples=[29501])
    """Port on the leading node over which the runners of all nodes communicate. Without it the rendezvous port + 1."""
    peer_bind: str | None = Field(default=None, min_length=1, examples=["10.0.0.5"])
    """Address of the first node to listen on (another node that leads uses its own). Without it all addresses."""
    local_addr: str | None = Field(default=None, examples=["10.0.0.5"])
    """Address or host name under which other nodes reach this one. Without it the host name."""
    rendezvous_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds to wait for the other nodes, at the start and after a node was lost; and, at a start, for storage that
    the run was using before."""
    cold: bool = False
    """Whether every rank starts in a fresh interpreter instead of a fork of a preloaded one. Needed by scripts that
    initialize CUDA or start threads when imported."""

    @model_validator(mode="before")
    @classmethod
    def _split_nnodes(cls, values: Any) -> Any:
        """Accept torchrun's MIN:MAX as `nnodes`."""
        if not isinstance(values, dict) or not isinstance(values.get("nnodes"), str):
            return values
        found = split_nnodes(values["nnodes"])
        if found is None:
            return values
        smallest, largest = found
        return {**values, "nnodes": largest, **({"min_nodes": smallest} if ":" in values["nnodes"] else {})}

    @property
    def endpoint(self) -> str:
        """Rendezvous endpoint of several nodes, host:port."""
        return self.rdzv_endpoint or self._first_node

    @property
    def _first_node(self) -> str:
        return f"{self.master_addr or 'localhost'}:{self.master_port}"

    def rendezvous(self, nnodes: int, host: str = "") -> tuple[str, str | None]:
        """Return the endpoint, host:port, and the address of this node for the others; None for torchrun's choice.

        The host is that of the node that leads, if that is another one than configured.
        """
        # A single node uses loopback: no other host may connect, and a pod's name may not resolve.
        own = "127.0.0.1" if nnodes == 1 else self.local_addr
        if self.rdzv_backend != "c10d" and nnodes > 1:
            return self.endpoint, own
        if host:
            shown = f"[{host}]" if ":" in host else host
            return f"{shown}:{self.rendezvous_address[1]}", own
        return self.endpoint if nnodes > 1 or self.rdzv_endpoint else "localhost:0", own

    @property
    def rendezvous_address(self) -> tuple[str, int]:
        """Host and port of the first node, where its ranks and runners are reached."""
        endpoint = self.endpoint if self.rdzv_backend == "c10d" else self._first_node
        host, _, port = endpoint.rpartition(":")
        if not host or not port.isdigit():
            host, port = endpoint.rstrip(":"), str(self.master_port)
        return host.strip("[]"), int(port)

    @property
    def peer_address(self) -> tuple[str, int]:
        """Host and port of the first node's runner. Raises ValueError if the port is out of range."""
        host, port = self.rendezvous_address
        number = self.peer_port or port + 1
        if not 0 < number < 65536:
            raise ValueError(f"port {number} for the connection between runners is out of range; set launch.peer_port")
        return host, number
