"""Environments that are known to break are refused before they do."""

from __future__ import annotations

import pytest

from seriatim import config
from seriatim.embedded import doctor
from seriatim.errors import ConfigError


def test_this_environment_is_good() -> None:
    """What the lock installs passes its own checks."""
    doctor.refuse_broken_environment(config.child_environment())


def test_two_versions_of_spark_are_refused() -> None:
    """The packages pyspark and pyspark-client overwrite each other's files."""
    found = {"pyspark": "4.2.0", "pyspark-client": "4.1.0", "pandas": "2.3.3"}
    with pytest.raises(ConfigError, match=r"pyspark 4\.2\.0 and pyspark-client 4\.1\.0"):
        doctor.check_packages(found.get)


def test_spark_alone_is_fine() -> None:
    """An environment that only folds has no pyspark-client."""
    doctor.check_packages({"pyspark": "4.2.0"}.get)


def test_pandas_3_is_refused() -> None:
    """Installable, and broken with this Spark."""
    with pytest.raises(ConfigError, match=r"pandas 3\.0\.1 does not work"):
        doctor.check_packages({"pandas": "3.0.1"}.get)


def test_old_python_is_refused() -> None:
    """The sentence names the version that is needed."""
    with pytest.raises(ConfigError, match=r"Python 3\.10 is too old: Seriatim needs 3\.11"):
        doctor.check_python((3, 10))


def test_a_package_that_is_not_there_has_no_version() -> None:
    """Absent is not an error by itself."""
    assert doctor.installed_version("no-such-package-of-seriatim") is None
