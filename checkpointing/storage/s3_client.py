"""Operations on one bucket, each retried while that may help, and over within a deadline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tenacity
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
    ProfileNotFound,
)

from checkpointing.storage.object_store import StorageError, StorageTimeout
from checkpointing.storage.s3_errors import check_is_s3, translated
from checkpointing.storage.s3_transport import MIN_BYTES_PER_S, deadline_s, lay_body_aside, take_body_up, within

_CONNECT_TIMEOUT_S = 5
# Longest silence on a connection. A slow link is not silent.
_SILENCE_TIMEOUT_S = 15
# Longest wait for the whole of a small answer, besides what the bytes need that were sent.
_ANSWER_WITHIN_S = 60.0


class S3Client:
    """A client of one bucket. Thread-safe.

    Attributes:
        location: The URL, as the user gave it, without a slash at its end.
        prefix: What every key begins with; keys of calls are relative to it.
    """

    def __init__(self, location: str, num_connections: int, retried: Callable[[str], None]) -> None:
        """Create a client. Credentials, region and endpoint come from where AWS's tools take them.

        Args:
            location: `s3://bucket/prefix`.
            num_connections: Connections that are kept open.
            retried: Called with the reason, from any thread, before a call is retried.

        Raises:
            ValueError: The URL names no bucket, or AWS's settings cannot be used.
        """
        import boto3

        self.location = location.rstrip("/")
        self._retried = retried
        bucket, _, prefix = location.removeprefix("s3://").rstrip("/").partition("/")
        if not bucket:
            raise ValueError(f"checkpoint.location {location!r} names no bucket; use s3://bucket/prefix")
        self._bucket, self.prefix = bucket, f"{prefix}/" if prefix else ""
        config = Config(
            connect_timeout=_CONNECT_TIMEOUT_S,
            read_timeout=_SILENCE_TIMEOUT_S,
            # Retries are made here, within a deadline.
            retries={"total_max_attempts": 1},
            max_pool_connections=num_connections,
            # It would refuse a memoryview, and so cost a copy of every part.
            parameter_validation=False,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"payload_signing_enabled": False},
        )
        try:
            session = boto3.session.Session()
            region = session.region_name or "us-east-1"
            self._client: Any = session.client("s3", config=config, region_name=region)
            self._client.meta.events.register_first("before-sign.s3", lay_body_aside)
            self._client.meta.events.register_last("request-created.s3", take_body_up)
        except (BotoCoreError, ValueError) as error:
            raise ValueError(f"checkpoint.location {location!r}: {error}") from None

    def reconnect(self) -> None:
        """Give all connections up: later calls make new ones."""
        self._client.close()

    def call(
        self,
        name: str,
        key: str | None,
        *,
        nbytes: int = 0,
        consume: Callable[[Any], Any] | None = None,
        borrows: bool = False,
        **arguments: Any,
    ) -> Any:
        """Make one call, again while that may help.

        Args:
            name: Name of the operation, as boto3 has it.
            key: Of the object; None where the call is about the bucket.
            nbytes: Bytes that it moves, for which its deadline is later.
            consume: Takes the answer, within the same try.
            borrows: It works on the caller's memory, so it must be over when this returns, and keeps the time itself.
            **arguments: Of the operation.

        Returns:
            The answer, or what `consume` made of it.

        Raises:
            StorageError: S3 refused.
            StorageTimeout: There was no answer until the deadline.
        """
        if key is not None:
            arguments["Key"] = self.prefix + key
        what = f"{name.replace('_', ' ')} {self.location}" + (f"/{key}" if key else "")

        def once() -> Any:
            try:
                answer = getattr(self._client, name)(Bucket=self._bucket, **arguments)
                check_is_s3(name, answer, what)
                return answer if consume is None else consume(answer)
            except ClientError as error:
                raise translated(error, what) from None
            except (NoCredentialsError, PartialCredentialsError, ProfileNotFound) as error:
                text = f"{what}: {error}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile"
                raise StorageError(text) from None
            except ParamValidationError as error:
                reason = " ".join(str(error).split())
                raise StorageError(f"{what}: the bucket's or the object's name is not allowed: {reason}") from None
            except (BotoCoreError, OSError) as error:
                if isinstance(error, StorageError):
                    raise
                raise StorageTimeout(f"{what}: {error}") from None
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                # Raised while the client parsed an answer that was damaged on its way.
                raise StorageTimeout(f"{what}: the answer makes no sense: {error}") from error

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(StorageTimeout),
            wait=tenacity.wait_random_exponential(multiplier=0.2, max=10),
            stop=tenacity.stop_after_delay(deadline_s(nbytes)),
            before_sleep=lambda state: self._retried(str(state.outcome and state.outcome.exception())),
            reraise=True,
        )
        if borrows:
            return retrying(once)
        return retrying(within, _ANSWER_WITHIN_S + nbytes / MIN_BYTES_PER_S, once, what)
