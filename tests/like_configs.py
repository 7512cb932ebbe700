"""Stand-ins for what Hydra passes: OmegaConf's DictConfig and ListConfig, without OmegaConf."""

from __future__ import annotations


class LikeListConfig:
    """A sequence to everybody but isinstance, as OmegaConf's ListConfig is."""

    def __init__(self, items):
        self._items = list(items)

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)

    def __getitem__(self, index):
        return self._items[index]


class LikeDictConfig:
    """A mapping to everybody but isinstance, as OmegaConf's DictConfig is: keys are attributes too."""

    def __init__(self, **content):
        self.__dict__["_content"] = {
            key: LikeListConfig(value) if isinstance(value, (list, tuple)) else value for key, value in content.items()
        }

    def __repr__(self):
        return f"LikeDictConfig({sorted(self._content)})"

    def __getattr__(self, name):
        try:
            return self.__dict__["_content"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __getitem__(self, key):
        return self._content[key]

    def __contains__(self, key):
        return key in self._content

    def __iter__(self):
        return iter(self._content)

    def __len__(self):
        return len(self._content)

    def get(self, key, default=None):
        return self._content.get(key, default)

    def keys(self):
        return self._content.keys()

    def values(self):
        return self._content.values()

    def items(self):
        return self._content.items()
