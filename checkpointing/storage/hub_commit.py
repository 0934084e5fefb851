"""Pushes files to a repository of the Hugging Face Hub, as one commit that is made once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from checkpointing.errors import CheckpointError, StorageUnreachable
from checkpointing.host.environment import not_installed

_CONFLICTS = (409, 412)
_PASSING = (408, 429)


class Pushed(NamedTuple):
    """A commit of the Hub.

    Attributes:
        commit: Its id.
        is_new: Whether this call has made it.
    """

    commit: str
    is_new: bool


def push_files(
    repo: str,
    files: Mapping[str, Path],
    *,
    title: str,
    marker: str,
    creates_private: bool = False,
    revision: str | None = None,
    endpoint: str | None = None,
) -> Pushed:
    """Commit files to a repository, all of them or none, unless one of its commits has the marker.

    The Hub keeps what was uploaded before a failure or a kill, so the next call uploads what is missing.

    Args:
        repo: `owner/name`.
        files: The files, by their names in the repository; others there are left as they are.
        title: Of the commit.
        marker: A line that only a commit of these files has.
        creates_private: Create the repository, private, where there is none.
        revision: Branch; None for the main one.
        endpoint: URL of the Hub; None for that of `HF_ENDPOINT`.

    Raises:
        CheckpointError: The Hub refused, with what to do about it.
        StorageUnreachable: It cannot be reached now, or has an error of its own.
    """
    try:
        import huggingface_hub
    except ModuleNotFoundError as error:
        raise CheckpointError(not_installed(error.name, "transformers")) from None
    api = huggingface_hub.HfApi(endpoint=endpoint)
    if api.token is None and huggingface_hub.get_token() is None:
        raise CheckpointError(
            f"there is no token to push to {repo} with; run `hf auth login`, or set HF_TOKEN to one that may write"
        )
    with _explained(repo, revision):
        if creates_private:
            api.create_repo(repo, private=True, exist_ok=True)
        history = api.list_repo_commits(repo, revision=revision)
        for commit in history:
            # A whole line: the marker may begin another one.
            if marker in (*commit.title.splitlines(), *commit.message.splitlines()):
                return Pushed(commit.commit_id, is_new=False)
        made = api.create_commit(
            repo,
            [huggingface_hub.CommitOperationAdd(name, path) for name, path in files.items()],
            commit_message=title,
            commit_description=marker,
            revision=revision,
            # Of two that push at the same time, one is refused.
            parent_commit=history[0].commit_id if history else None,
        )
    return Pushed(str(made.oid), is_new=True)


@contextmanager
def _explained(repo: str, revision: str | None) -> Iterator[None]:
    """Have what the Hub answers end in one sentence, with what to do about it."""
    from huggingface_hub import errors

    try:
        yield
    except errors.HFValidationError as error:
        raise CheckpointError(f"{repo!r} is not the name of a repository: {_line(error)}; write OWNER/NAME") from None
    except errors.RevisionNotFoundError:
        raise CheckpointError(f"{repo} has no branch {revision!r}; create it, or leave --revision out") from None
    except errors.RepositoryNotFoundError:
        raise CheckpointError(
            f"there is no repository {repo} that the token may see; create it, or pass --private to have it created"
        ) from None
    except (errors.HfHubHTTPError, errors.OfflineModeIsEnabled, RuntimeError, OSError) as error:
        raise _refusal(repo, error) from error
    except Exception as error:
        # The client's library of HTTP has a hierarchy of its own.
        if type(error).__module__.partition(".")[0].startswith(("httpx", "requests")):
            raise _refusal(repo, error) from error
        raise


def _refusal(repo: str, error: BaseException) -> CheckpointError:
    # Threads that upload wrap what has happened.
    cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ is not None else error
    answer: Any = getattr(cause, "response", None)
    status = getattr(answer, "status_code", None)
    if status in (401, 403):
        return CheckpointError(
            f"the Hub does not let this token write to {repo}; use one that may (`hf auth login`, or HF_TOKEN)"
        )
    if status in _CONFLICTS:
        return CheckpointError(f"{repo} was changed while the files were pushed; push again")
    if status is not None and status < 500 and status not in _PASSING:
        return CheckpointError(f"the Hub refused the push to {repo}: {_line(cause)}")
    return StorageUnreachable(f"the Hub did not take the push to {repo} ({_line(cause)}); push again to continue")


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".:") if lines else type(error).__name__
