"""The compilation room: every XLA setting, the bounded store of compiled programs, and the ladder of padded shapes.

A long-lived process must not die of its programs: Linux allows a process 65,530 memory maps, a compiled program takes
some ten of them, and JAX's own caches give none back. So every program of the library is compiled through
:func:`program`, which keeps it in one bounded store that forgets what was not used for longest.
"""

from fathomgp.compilation._count import CompilationCount as CompilationCount
from fathomgp.compilation._count import count_compilations as count_compilations
from fathomgp.compilation._double import double_program as double_program
from fathomgp.compilation._ladder import padded_length as padded_length
from fathomgp.compilation._ladder import power_of_two as power_of_two
from fathomgp.compilation._ladder import question_rows as question_rows
from fathomgp.compilation._ladder import repeat_last_row as repeat_last_row
from fathomgp.compilation._options import ONE_CORE as ONE_CORE
from fathomgp.compilation._options import RUN_ONCE as RUN_ONCE
from fathomgp.compilation._options import RUN_SELDOM as RUN_SELDOM
from fathomgp.compilation._program import Program as Program
from fathomgp.compilation._program import program as program
from fathomgp.compilation._store import ProgramStore as ProgramStore
from fathomgp.compilation._store import memory_maps as memory_maps
from fathomgp.compilation._store import programs as programs
