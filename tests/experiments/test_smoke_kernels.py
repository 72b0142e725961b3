"""Tables run: kernels. A file for some of them each, since files are what is shared among processes."""

import pytest

from tests.experiments.smoke import check, of


@pytest.mark.parametrize("name", of("geq", "kerdeq"))
def test_every_table_trains_and_is_measured(name, tmp_path_factory):
    check(name, tmp_path_factory.getbasetemp() / "tables")
