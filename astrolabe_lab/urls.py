"""URLs of servers, as options and arguments give them."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from astrolabe_lab.errors import InputError

LIKE = "http://127.0.0.1:8001"


def url_of(given: str, option: str) -> str:
    """The URL without a trailing slash. Raises InputError, naming ``option``, for what is no http(s) URL."""
    url = _clean(given)
    if not _is_url(url):
        raise InputError(f"{option} {given!r} is not a URL like {LIKE}")
    return url


def urls_of(given: str | Sequence[str] | None, option: str) -> list[str]:
    """Those of "URL,..." or of a sequence. Raises InputError, as ``url_of`` does, and where there is none, a blank
    between the commas, or one twice."""
    urls = [_clean(each) for each in (given.split(",") if isinstance(given, str) else given or ())]
    bad = [url for url in urls if not _is_url(url)]
    if not any(urls):
        why = "names none"
    elif "" in urls:
        why = "has a blank between commas, or at an end"
    elif bad:
        why = f"{bad[0]!r} is not a URL"
    elif len(set(urls)) < len(urls):
        why = f"names {max(urls, key=urls.count)} more than once"
    else:
        return urls
    raise InputError(f"{option} {given or ''!r}: {why}; give URLs like {LIKE}, each once, with commas between")


def _clean(given) -> str:
    return given.strip().rstrip("/") if isinstance(given, str) else ""


def _is_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - raises where it is none
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and not set(url) & set(", \t\n")
