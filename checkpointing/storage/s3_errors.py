"""The meaning of an answer of S3: the error to raise, and whether S3 itself has answered."""

from __future__ import annotations

from typing import Any

from botocore.exceptions import (
    ClientError,
)

from checkpointing.storage.object_store import StorageError, StorageTimeout

_RETRIED_CODES = {
    "InternalError",
    "OperationAborted",
    "RequestTimeout",
    "RequestTimeTooSkewed",
    "ServiceUnavailable",
    "SlowDown",
    "ThrottlingException",
    "Throttling",
}

# Fields of every S3 server's answer to a successful call, which the page of a proxy in front of it lacks.
_PROOFS = {
    "put_object": ("ETag",),
    "upload_part": ("ETag",),
    "create_multipart_upload": ("UploadId",),
    # Its ETag is empty at radosgw 16.
    "complete_multipart_upload": ("Bucket", "Key"),
    "get_object": ("ETag",),
    "list_objects_v2": ("Name", "IsTruncated"),
    "list_multipart_uploads": ("Bucket",),
}

_FIXES = {
    "InvalidAccessKeyId": "the access key is unknown there; check AWS_ACCESS_KEY_ID",
    "SignatureDoesNotMatch": "the secret key is wrong; check AWS_SECRET_ACCESS_KEY",
    "ExpiredToken": "the credentials have expired; renew them",
    "NoSuchBucket": "the bucket does not exist; create it, or check the name",
    "AccessDenied": "these credentials may not do this; allow list, get, put and delete under the prefix",
    "AllAccessDisabled": "these credentials may not do this; allow list, get, put and delete under the prefix",
    "QuotaExceeded": "the quota is used up; raise it, or keep fewer checkpoints",
    "RequestTimeTooSkewed": "this machine's clock is wrong; set it",
}


class Missing(StorageError):
    """No such object, or upload."""


class PreconditionFailed(StorageError):
    """The object exists already."""


class _Throttled(StorageTimeout):
    """The server is overloaded or failing; or a proxy in front of it is, which may have forwarded the call."""


def check_is_s3(name: str, answer: dict[str, Any], what: str) -> None:
    """Check that S3 itself has answered.

    Args:
        name: Name of the operation.
        answer: The answer, as botocore parsed it.
        what: Describes the call in errors.

    Raises:
        StorageTimeout: Something else answered, so it is unknown whether the call took effect; a retry may help.
    """
    metadata = answer["ResponseMetadata"]
    proofs, headers = _PROOFS.get(name), metadata["HTTPHeaders"]
    if proofs is None:
        proven = metadata["HTTPStatusCode"] == 204 or bool(metadata.get("RequestId"))
    else:
        # A web server's page may have an ETag too.
        is_page = headers.get("content-type", "").startswith("text/html") and headers.get("content-length") != "0"
        proven = not is_page and all(answer.get(field) not in (None, "") for field in proofs)
    if not proven:
        raise _not_s3(answer, what)


def _not_s3(answer: dict[str, Any], what: str) -> StorageTimeout:
    metadata = answer["ResponseMetadata"]
    kind = metadata["HTTPHeaders"].get("content-type", "without a type")
    return StorageTimeout(
        f"{what}: what answered is not S3 ({metadata['HTTPStatusCode']}, {kind}); check AWS_ENDPOINT_URL, and proxies"
    )


def translated(error: ClientError, what: str) -> StorageError:
    """Return the error to raise for an answer that botocore takes for an error.

    Args:
        error: The error.
        what: Describes the call.

    Returns:
        A StorageTimeout if a retry may help, Missing, PreconditionFailed, or another StorageError.
    """
    code = str(error.response.get("Error", {}).get("Code", ""))
    metadata = error.response.get("ResponseMetadata", {})
    status = int(metadata.get("HTTPStatusCode", 0))
    if (not code or code.isdecimal()) and not metadata.get("RequestId"):
        # Not an error of S3, which has a code or a request id.
        return _Throttled(str(_not_s3(error.response, what)))
    message = error.response.get("Error", {}).get("Message") or code or "no reason given"
    text = f"{what}: {_FIXES.get(code, message)} ({status} {code})"
    if status == 412 or code == "PreconditionFailed":
        return PreconditionFailed(text)
    if code in ("NoSuchKey", "NoSuchUpload") or (status == 404 and code in ("404", "NotFound")):
        return Missing(text)
    if code in _RETRIED_CODES or status in (429, 500, 502, 503, 504):
        return _Throttled(text)
    return StorageError(text)
