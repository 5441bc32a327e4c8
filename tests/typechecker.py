"""beartype as the tests use it: an int is fine where a float is annotated (PEP 484's numeric tower)."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
