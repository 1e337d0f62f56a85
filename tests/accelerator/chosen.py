"""Which device these tests run on: the simulated one, or ``--device cuda``, which ``conftest.py`` puts here."""

from tests.helpers import simulated

kind = simulated.NAME
