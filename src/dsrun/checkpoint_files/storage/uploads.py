"""Uploads that were begun and neither ended nor given up, as S3 keeps them: they cost, and no listing shows them.

A writer that was killed leaves one. Other stores drop what was not ended by themselves, Google's after a week.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .places import Address, Entry


@dataclass(frozen=True, slots=True)
class Upload:
    """An unfinished upload.

    Attributes:
        entry: the file it would become, or the folder below which it would be.
        give_up: drops its parts; a folder's cannot be given up here.
    """

    entry: Entry
    give_up: Callable[[], None]


def uploads_below(system: Any, folder: Address) -> list[Upload]:
    """Returns the uploads directly in a folder, and a folder for those further below; none where nobody may look.

    Args:
        system: file system object of fsspec; one that does not use the S3 protocol has no uploads.
        folder: folder in a bucket, in which to look for uploads.
    """
    if not hasattr(system, "list_multipart_uploads"):
        return []
    bucket, _, key = folder.path.partition("/")
    prefix = f"{key}/" if key else ""
    found: list[Upload] = []
    after: dict[str, str] = {}
    while True:
        try:
            page = system.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix, Delimiter="/", **after)
        except (FileNotFoundError, PermissionError):
            return found  # no bucket; or a right of its own, which a run does not need
        except OSError as error:
            if error.errno == errno.ENOSYS:  # a server that speaks S3's protocol in part
                return found
            raise
        for one in page.get("Uploads", []):
            name = one["Key"].removeprefix(prefix)
            # Not every server heeds the delimiter.
            if "/" not in name:
                found.append(_upload(system, bucket, one, name))
            else:
                found.append(_below(name.partition("/")[0]))
        found += [_below(one["Prefix"].removeprefix(prefix).strip("/")) for one in page.get("CommonPrefixes", [])]
        if not page.get("IsTruncated"):
            return found
        after = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}


def _upload(system: Any, bucket: str, one: dict[str, Any], name: str) -> Upload:
    def give_up() -> None:
        system.call_s3("abort_multipart_upload", Bucket=bucket, Key=one["Key"], UploadId=one["UploadId"])

    return Upload(Entry(name, 0, one["Initiated"].timestamp(), is_folder=False), give_up)


def _below(name: str) -> Upload:
    return Upload(Entry(name, 0, 0.0, is_folder=True), lambda: None)
