"""YAML as its readers expect it: a key twice is an error, `1e-7` is a number, `on` and `no` are words.

Anchors and merges (`<<: *usual`) work; a key of the mapping itself wins over a merged one.
"""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from astrolabe_lab.errors import InputError
from astrolabe_lab.text_files import text_of

MERGE = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """YAML 1.2's numbers and booleans, in place of 1.1's."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rules if not tag.endswith((":bool", ":float", ":int", ":timestamp"))]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_DECIMAL = r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
for _tag, _pattern, _first in (
    ("bool", "true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", "[-+]?[0-9]+", "-+0123456789"),
    ("float", rf"{_DECIMAL}|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+.0123456789"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), list(_first))
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(loader.construct_scalar(node)))


def _mapping(loader, node, deep=False):
    seen = set()
    for key_node, _ in node.value:
        if key_node.tag == MERGE:
            continue
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise InputError(f"line {key_node.start_mark.line + 1}: the key {key!r} is no name; put it in quotes")
        if key in seen:
            raise InputError(f"line {key_node.start_mark.line + 1}: {key} is given twice")
        seen.add(key)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def read(path: Path) -> object:
    """What the file holds. Raises InputError for a file that cannot be read, or is no YAML."""
    text = text_of(path, "this grid")
    try:
        found = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        raise InputError(f"{path}: {where}this is not YAML: {getattr(error, 'problem', error)}") from None
    except RecursionError:
        raise InputError(f"{path}: it is nested too deep to be a grid") from None
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    if found is None:
        raise InputError(f"{path}: it is empty; a grid has at least a policy and a trace, see `astrolabe sweep --help`")
    return found
