"""XLA's compiler options, by what a program is for."""

from collections.abc import Mapping

CompilerOptions = Mapping[str, bool | int | str]

#: For what runs once: XLA's optimiser would cost a hundred times what it saves. Its older code generator compiles in
#: less than half the time of the present one.
RUN_ONCE: CompilerOptions = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
#: For what runs a few times in a fit.
RUN_SELDOM: CompilerOptions = {"xla_backend_optimization_level": 1, "xla_cpu_use_fusion_emitters": False}
#: For what keeps to the core of the thread that calls it, in vectors of 512 bits where the processor has them: XLA
#: prefers 256.
ONE_CORE: CompilerOptions = {"xla_cpu_multi_thread_eigen": False, "xla_cpu_prefer_vector_width": 512}
