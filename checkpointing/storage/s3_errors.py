"""What an answer of S3 means: the error to raise, and whether S3 itself has answered."""

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

# What every S3 server says where it has done what it was asked; a page of whatever stands before it does not.
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

_MENDS = {
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
    """There is one already."""


class _Throttled(StorageTimeout):
    """The server asks for patience, or is ill; or what stands before it, which may have passed the call on."""


def check_is_s3(name: str, answer: dict[str, Any], what: str) -> None:
    """Whether S3 itself has answered; asked again, it may.

    Raises:
        StorageTimeout: it was something else, so what has become of the call is not known.
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
    code = str(error.response.get("Error", {}).get("Code", ""))
    metadata = error.response.get("ResponseMetadata", {})
    status = int(metadata.get("HTTPStatusCode", 0))
    if (not code or code.isdecimal()) and not metadata.get("RequestId"):
        # No error of S3's: neither its code nor its number for the call.
        return _Throttled(str(_not_s3(error.response, what)))
    message = error.response.get("Error", {}).get("Message") or code or "no reason given"
    text = f"{what}: {_MENDS.get(code, message)} ({status} {code})"
    if status == 412 or code == "PreconditionFailed":
        return PreconditionFailed(text)
    if code in ("NoSuchKey", "NoSuchUpload") or (status == 404 and code in ("404", "NotFound")):
        return Missing(text)
    if code in _RETRIED_CODES or status in (429, 500, 502, 503, 504):
        return _Throttled(text)
    return StorageError(text)
