"""The bounded store of compiled programs: one compilation per key, the least recently used are given back."""

import gc
import pathlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from fathomgp.errors import SettingError

_MAPS = pathlib.Path("/proc/self/maps")
_MAX_MAPS = pathlib.Path("/proc/sys/vm/max_map_count")
#: Linux's own bound, where the file that tells it cannot be read.
_USUAL_MAX_MAPS = 65_530
#: The share of the allowed memory maps beyond which programs are given back. The rest belongs to the user's own
#: programs and to eager operations, which nobody can free.
_SHARE_OF_MAPS = 0.3
#: How much of the store is given back at once when maps run short: each round looks for garbage, which takes time.
_SHARE_GIVEN_BACK = 0.5


def memory_maps() -> int | None:
    """How many memory maps this process has, or ``None`` where the system does not tell."""
    try:
        return _MAPS.read_bytes().count(b"\n")
    except OSError:
        return None


def _allowed_maps() -> int:
    try:
        return int(_MAX_MAPS.read_text())
    except (OSError, ValueError):
        return _USUAL_MAX_MAPS


class _Entry:
    """A program, or the promise of one that another thread is compiling."""

    def __init__(self) -> None:
        self.ready = threading.Event()
        self.value: Any = None
        self.failed = False


class ProgramStore:
    """Compiled programs by key, at most so many, the least recently used given back first.

    Any number of threads may ask. A key is compiled by the first that asks, the others wait for it. A program that is
    given back while it runs lives until its call returns.

    Attributes:
        most: how many programs are kept.
        most_maps: beyond so many memory maps of the process, half the store is given back; ``None``: no look at them.
    """

    def __init__(self, most: int = 512, most_maps: int | None = None):
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._lock = threading.RLock()
        self.most, self.most_maps = most, most_maps

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable, compile_program: Callable[[], Any]) -> Any:
        """The program of ``key``, compiled by ``compile_program`` where it is not kept."""
        while True:
            with self._lock:
                entry = self._entries.get(key)
                ours = entry is None
                if entry is None:
                    entry = self._entries[key] = _Entry()
                else:
                    self._entries.move_to_end(key)
            if ours:
                return self._fill(key, entry, compile_program)
            entry.ready.wait()
            if not entry.failed:
                return entry.value

    def limit(self, most: int | None = None, most_maps: int | None = None) -> None:
        """Change how much is kept; ``None`` leaves a bound as it is."""
        for name, value in (("most", most), ("most_maps", most_maps)):
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SettingError(f"{name} must be a whole number of at least 1, but it is {value!r}.")
            setattr(self, name, value)
        with self._lock:
            self._give_back(len(self._entries) - self.most)

    def clear(self) -> None:
        """Give all programs back that are not being compiled."""
        with self._lock:
            self._give_back(len(self._entries))

    def _fill(self, key: Hashable, entry: _Entry, compile_program: Callable[[], Any]) -> Any:
        try:
            self._make_room()
            entry.value = compile_program()
        except BaseException:
            entry.failed = True  # whoever waits tries again, and meets the error where it can be reported
            with self._lock:
                if self._entries.get(key) is entry:
                    del self._entries[key]
            raise
        finally:
            entry.ready.set()
        return entry.value

    def _make_room(self) -> None:
        bound = int(_SHARE_OF_MAPS * _allowed_maps()) if self.most_maps is None else self.most_maps
        maps = memory_maps()
        with self._lock:
            if maps is not None and maps > bound:
                self._give_back(max(1, int(_SHARE_GIVEN_BACK * len(self._entries))))
            elif len(self._entries) > self.most:
                self._give_back(len(self._entries) - self.most)

    def _give_back(self, count: int) -> None:
        """Forget the ``count`` programs that were not used for longest; what is being compiled stays."""
        if count <= 0:
            return
        ready = [key for key, entry in self._entries.items() if entry.ready.is_set()]
        for key in ready[:count]:
            del self._entries[key]
        if ready:
            gc.collect()  # an executable stands in reference cycles with its wrappers


#: The library's one store. A program of a fit takes some ten memory maps.
programs = ProgramStore()
