"""The identity of a job, so that a run never resumes from checkpoints of another job.

A job is a flat mapping of names to values: the script with its content and arguments, or the configured model, method,
data and trainer options. Options that may change without making it another job are not part of it. After a job has
finished, its `settings` (steps, epochs, arguments) say whether there is more to do.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import xxhash
import yaml

from checkpointing.host.threads import in_background
from runner.config.schema import Config
from runner.errors import UsageError
from runner.program.nested_launchers import launcher_of, unnested
from runner.program.program import Program
from runner.session.masking import is_secret, masked

RECORD_NAME = "job.json"
_VERSION = 1


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Trainer options that may change without making it another job, as may the sections `launch`, `restart`, `strategy`,
# `checkpoint`, `guards`, `tracking`, `monitoring`, `cost` and `output_dir`.
CHANGEABLE_OPTIONS = (
    # The length of the training, and the parts of the learning rate's schedule that follow from it.
    _names("max_steps num_train_epochs warmup_steps warmup_ratio")
    # How the samples of a step are split; the ranks check their number.
    | _names("per_device_train_batch_size gradient_accumulation_steps auto_find_batch_size")
    # When it saves and evaluates, and what it keeps.
    | _names(
        """save_strategy save_steps save_total_limit save_on_each_node save_only_model metric_for_best_model
        greater_is_better load_best_model_at_end output_dir overwrite_output_dir do_eval do_predict eval_strategy
        eval_steps eval_delay eval_on_start eval_accumulation_steps eval_do_concat_batches eval_use_gather_object
        per_device_eval_batch_size batch_eval_metrics prediction_loss_only include_for_metrics
        include_num_input_tokens_seen"""
    )
    # What it logs, and where it reports to.
    | _names(
        """logging_strategy logging_steps logging_first_step logging_nan_inf_filter logging_dir log_level
        log_level_replica log_on_each_node report_to run_name project disable_tqdm skip_memory_metrics push_to_hub
        hub_model_id hub_strategy hub_private_repo hub_always_push hub_revision trackio_space_id trackio_bucket_id
        trackio_static_space_id"""
    )
    # How it is computed, and on which devices.
    | _names(
        """dataloader_num_workers dataloader_prefetch_factor dataloader_persistent_workers dataloader_pin_memory
        dataloader_multiprocessing_context dataset_num_proc ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb
        ddp_find_unused_parameters ddp_static_graph ddp_timeout deepspeed fsdp fsdp_config local_rank use_cpu
        gradient_checkpointing gradient_checkpointing_kwargs activation_checkpointing activation_checkpointing_kwargs
        activation_offloading torch_compile torch_compile_backend torch_compile_mode torch_empty_cache_steps
        full_determinism debug enable_jit_checkpoint resume_from_checkpoint restore_callback_states_from_checkpoint"""
    )
)
# Arguments of a script that may change: these options, and other names for them. Dashes count as underscores.
CHANGEABLE_ARGUMENTS = CHANGEABLE_OPTIONS | _names(
    """steps num_steps total_steps train_steps max_train_steps num_train_steps iterations max_iterations max_iters
    epochs num_epochs max_epochs n_epochs train_epochs total_epochs
    save_every save_interval save_freq checkpoint_every checkpointing_steps eval_every eval_interval
    log_every log_interval logging_interval log_dir out_dir output_path save_dir checkpoint_dir
    workers num_workers resume resume_from verbose"""
)
# Those of them that are flags: the next argument is not their value.
_FLAGS = _names("overwrite_output_dir disable_tqdm verbose push_to_hub")

_WHOLE_BYTES = 256 * 1024 * 1024
_NUM_PIECES, _PIECE_BYTES = 64, 1024 * 1024
# Seconds for a server's answer about a file; without it the file's name identifies the data.
_PATIENCE_S = 5.0
_CONTENT = " content"
# Files of settings among the arguments; larger ones are data.
_SETTINGS_BYTES = 1024 * 1024
_PARSERS: dict[str, Callable[[str], Any]] = {
    ".yaml": yaml.safe_load,
    ".yml": yaml.safe_load,
    ".json": json.loads,
    ".toml": tomllib.loads,
}
_SHOWN_CHARACTERS, _SHOWN_DIFFERENCES = 40, 6


@dataclass(frozen=True)
class JobIdentity:
    """A job.

    Attributes:
        what: The values that identify it. Names that end with " content" are digests, which are absent if unknown.
        settings: Values that may change, and say how far it should run.
    """

    what: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Forget secrets, also those that an earlier version has recorded."""
        for name in ("what", "settings"):
            kept = {key: masked(value) for key, value in getattr(self, name).items() if not is_secret(key)}
            object.__setattr__(self, name, kept)

    def to_json(self) -> bytes:
        """Return the job as a record."""
        body = {"version": _VERSION, "job": dict(self.what), "settings": dict(self.settings)}
        return json.dumps(body, indent=1).encode() + b"\n"

    @classmethod
    def from_json(cls, data: bytes | None) -> JobIdentity | None:
        """Parse a record; None if there is none, or if it is damaged or of another version."""
        try:
            body = json.loads(data or b"")
            what, settings = body["job"], body["settings"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        if body.get("version") != _VERSION or not isinstance(what, dict) or not isinstance(settings, dict):
            return None
        return cls(what, settings) if isinstance(what.get("job"), str) else None

    def completed_by(self, earlier: JobIdentity) -> JobIdentity:
        """Return the job with digests that are not available now, from an earlier record of the same job."""
        known = {name: value for name, value in earlier.what.items() if name.endswith(_CONTENT)}
        return JobIdentity({**known, **self.what}, self.settings) if known.keys() - self.what.keys() else self


def key_of(job: JobIdentity) -> str:
    """Return a digest of a job, equal for equal jobs."""
    text = json.dumps({"job": dict(job.what), "settings": dict(job.settings)}, sort_keys=True)
    return xxhash.xxh3_128_hexdigest(text.encode(errors="surrogatepass"))


# Options that may differ between the nodes of one attempt.
_PER_NODE = _names(
    """dataloader_num_workers dataloader_prefetch_factor dataloader_persistent_workers dataloader_pin_memory
    dataset_num_proc local_rank output_dir overwrite_output_dir disable_tqdm logging_dir log_level log_level_replica
    log_on_each_node report_to run_name project skip_memory_metrics debug log_dir out_dir output_path save_dir
    checkpoint_dir workers num_workers verbose"""
)


def between_nodes(job: JobIdentity, location: str | None) -> JobIdentity:
    """Return what must be equal on all nodes of one attempt, which is more than the job itself.

    The location of the checkpoints is as the user gave it; None if each node uses its own folder.
    """
    settings = {
        name: value
        for name, value in job.settings.items()
        if name.removeprefix("trainer.").removeprefix("--") not in _PER_NODE
    }
    place = {"checkpoint.location": location} if location is not None else {}
    return JobIdentity({**job.what, **settings, **place}, {})


def differences(old: JobIdentity, new: JobIdentity) -> list[str]:
    """Return what makes `new` another job than `old`, one text per name; empty if it is the same job."""
    if old.what["job"] != new.what["job"]:
        return [_change("job", old.what, new.what)]
    found: list[str] = []
    changed: set[str] = set()
    names_only = _files_known_by_name(old, new)
    for name in dict.fromkeys([*new.what, *old.what]):
        before, after = old.what.get(name), new.what.get(name)
        if before == after or name.partition(".")[0] in names_only:
            continue
        subject = name.removesuffix(_CONTENT)
        if subject == name:
            changed.add(name)
            found.append(_change(name, old.what, new.what))
        elif before is not None and after is not None and subject not in changed:
            found.append(f"{subject}: content changed")
    return found


def _files_known_by_name(old: JobIdentity, new: JobIdentity) -> set[str]:
    """Return the arguments of which an older version has recorded a file's name, and not its contents."""
    before, now = ({name.partition(".")[0] for name in [*job.what, *job.settings] if "." in name} for job in (old, new))
    return {name for name in now - before if name in old.what and name.startswith(("--", "arguments"))}


def summarised(texts: Sequence[str]) -> str:
    """Return differences as one text, without those after the sixth."""
    shown = "; ".join(texts[:_SHOWN_DIFFERENCES])
    return shown + (f"; and {len(texts) - _SHOWN_DIFFERENCES} more" if len(texts) > _SHOWN_DIFFERENCES else "")


def identify(config: Config, program: Program | None = None) -> JobIdentity:
    """Return the identity of a job: of the configured one, or of a user's program and its arguments.

    Raises:
        UsageError: A file of settings among the arguments of a launcher cannot be read.
    """
    return _identify_program(program) if program is not None else _identify_configured(config)


def _identify_program(program: Program) -> JobIdentity:
    nested = unnested(program, {})
    launched, launcher = nested.inner or program, launcher_of(program)
    what: dict[str, Any] = {"job": f"{launched.kind} {launched.label}"}
    if launched.file is not None:
        _add_content(what, launched.label, digest_of_file(launched.file))
    settings: dict[str, Any] = {}
    if nested.inner is not None and launcher is not None:
        own = program.args[: len(program.args) - len(launched.args) - 1]
        ranks = {*launcher.options, launcher.config, "module", "m"}
        _add_arguments(what, settings, own, f"{program.label} ", without=ranks)
    known = launcher_of(launched) is not None
    _add_arguments(what, settings, launched.args, "", without=launcher.options if launcher else (), is_known=known)
    return JobIdentity(what, settings)


def _add_arguments(
    what: dict[str, Any],
    settings: dict[str, Any],
    arguments: Sequence[str],
    prefix: str,
    *,
    without: Collection[str | None] = (),
    is_known: bool = False,
) -> None:
    """Add a program's arguments; of files of settings their contents, whatever they are called.

    Args:
        what: Takes what makes it another job.
        settings: Takes what may change.
        arguments: The arguments.
        prefix: In front of their names.
        without: Options that do not count.
        is_known: Whether the program reads files of settings, which must be sound.
    """
    positional: list[str] = []
    for name, value in parse_arguments(arguments):
        if name is not None and name in without:
            continue
        label = prefix + (f"--{name}" if name is not None else "arguments")
        found = _settings_in(str(value), is_known=is_known) if value is not True else None
        if found is not None:
            for key, one in _flat(label, found).items():
                last = _normalised(key.rpartition(".")[2])
                (settings if last in CHANGEABLE_ARGUMENTS else what)[key] = one
        if name is None:
            positional.append(f"({Path(str(value)).suffix})" if found is not None else str(value))
        elif found is None:
            # If an option is given twice, both values count.
            target = settings if name in CHANGEABLE_ARGUMENTS else what
            target[label] = f"{target[label]} {value}" if label in target else value
    if positional:
        what[f"{prefix}arguments"] = " ".join(positional)


def _settings_in(text: str, *, is_known: bool) -> dict[str, Any] | None:
    """Return the settings in a file of which an argument is the path; None if it is none."""
    path = Path(text)
    try:
        if path.suffix not in _PARSERS or path.stat().st_size > _SETTINGS_BYTES:
            return None
        found = _PARSERS[path.suffix](path.read_text(encoding="utf-8"))
    except OSError:
        return None
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        if is_known:
            why = " ".join(str(error).split())
            raise UsageError(f"{text} is no {path.suffix[1:].upper().replace('YML', 'YAML')}: {why}") from None
        found = None
    if isinstance(found, dict):
        return json.loads(json.dumps(found, default=str)) if found else {}
    return {"content": digest_of_file(path)}


def parse_arguments(arguments: Sequence[str]) -> list[tuple[str | None, str | bool]]:
    """Split a script's arguments into options and others.

    Returns:
        For each option its name, with underscores and without leading dashes, and its value (True if it has none); for
        any other argument None and the argument. Hydra's `name=value` is an option named by the last part of `name`.
    """
    found: list[tuple[str | None, str | bool]] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        name, separator, value = argument.partition("=")
        if not argument.startswith("-") or not name.strip("-"):
            key = name.lstrip("+").rpartition(".")[2] if separator else ""
            is_option = re.fullmatch(r"[\w-]+", key) is not None and _normalised(key) in CHANGEABLE_ARGUMENTS
            found.append((_normalised(key), value) if is_option else (None, argument))
        elif _is_number(argument):
            found.append((None, argument))
        elif separator:
            found.append((_normalised(name), value))
        elif rest and (not rest[0].startswith("-") or _is_number(rest[0])) and _normalised(name) not in _FLAGS:
            found.append((_normalised(name), rest.pop(0)))
        else:
            found.append((_normalised(name), True))
    return found


def _normalised(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _is_number(text: str) -> bool:
    return re.fullmatch(r"-\d*\.?\d+(?:[eE][+-]?\d+)?", text) is not None


def _identify_configured(config: Config) -> JobIdentity:
    what: dict[str, Any] = {"job": "the configured job"}
    # Defaults are left out, so that new keys of a later version do not make it another job.
    model = config.model.model_dump(mode="json", exclude_defaults=True)
    name = model.pop("name_or_path", None)
    if name is not None:
        folder = Path(name)
        what["model.name_or_path"] = folder.resolve().name if folder.is_dir() else name
        _add_content(what, "model.name_or_path", _digest_of_folder(folder) if folder.is_dir() else None)
    what |= _flat("model", model)
    what |= _flat("method", config.method.model_dump(mode="json", exclude_defaults=True))
    data = config.data.model_dump(mode="json", exclude_defaults=True)
    for key in ("path", "validation_path"):
        source = data.pop(key, None)
        if source is not None:
            what[f"data.{key}"], content = _describe_data(source)
            _add_content(what, f"data.{key}", content)
    what.setdefault("data.path", "the bundled data")
    what |= _flat("data", data)
    what["scale_learning_rate"] = config.scale_learning_rate
    settings: dict[str, Any] = {}
    for option, value in sorted(config.trainer.items()):
        if value is not None:
            target = settings if option in CHANGEABLE_OPTIONS else what
            target[f"trainer.{option}"] = json.loads(json.dumps(value, default=str))
    return JobIdentity(what, settings)


def _flat(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}.{key}"
        found |= _flat(name, value) if isinstance(value, dict) else {name: value}
    return found


def _add_content(what: dict[str, Any], name: str, digest: str | None) -> None:
    if digest is not None:
        what[f"{name}{_CONTENT}"] = digest


def _describe_data(source: str) -> tuple[str, str | None]:
    """Return the name of data, and the digest of its content; None if that is unknown."""
    local = source.removeprefix("file://") if source.startswith("file:///") else source
    if "://" in local:
        parts = urlsplit(local)
        # The name has neither credentials nor the signature of a link, which differs each time.
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}", _ask_server(source)
    path = Path(local)
    if path.is_dir():
        return path.resolve().name, _digest_of_folder(path)
    return (path.name, digest_of_file(path)) if path.is_file() else (source, None)


def digest_of_file(path: Path) -> str | None:
    """Return a digest of a file: above 256 MiB of its size and 64 parts of 1 MiB. None if it cannot be read."""
    state = xxhash.xxh3_64()
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= _WHOLE_BYTES:
                while piece := file.read(16 * _PIECE_BYTES):
                    state.update(piece)
            else:
                state.update(str(size).encode())
                for number in range(_NUM_PIECES):
                    file.seek((size - _PIECE_BYTES) * number // (_NUM_PIECES - 1))
                    state.update(file.read(_PIECE_BYTES))
    except OSError:
        return None
    return f"xxh3:{state.hexdigest()}"


def _digest_of_folder(folder: Path) -> str | None:
    """Return a digest of the names and sizes of a folder's files, and of the content of config.json."""
    state = xxhash.xxh3_64()
    try:
        paths = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
        for path in paths:
            state.update(f"{path.name}\0{path.stat().st_size}\0".encode())
    except OSError:
        return None
    state.update((digest_of_file(folder / "config.json") or "").encode())
    return f"xxh3:{state.hexdigest()}"


def _ask_server(url: str) -> str | None:
    """Return size and entity tag of a file at a URL; None if its server does not report both in time."""

    def ask() -> str | None:
        import fsspec

        file_system, path = fsspec.core.url_to_fs(url)
        info = file_system.info(path)
        size, tag = info.get("size"), next((info[key] for key in ("ETag", "etag", "md5Hash") if info.get(key)), None)
        return f"{size} bytes, tag {tag}" if size is not None and tag is not None else None

    try:
        return in_background(ask, "identity").result(_PATIENCE_S)
    except Exception:  # of any back end, or the time-out
        return None


def _change(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    return f"{name}: {_shown(old.get(name))} -> {_shown(new.get(name))}"


def _shown(value: Any) -> str:
    if value is None:
        return "(not given)"
    text = " ".join((value if isinstance(value, str) else json.dumps(value)).split())
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 1]}…"
