"""Configurations changed in places, and the one error in which all that is wrong is listed."""

import dataclasses

import pytest

from gt_config import ConfigError
from gt_trainer.preflight.preflight import check_configuration


def changed(config, folder, **sections):
    """Change fields of sections: ``changed(config, folder, training={"steps": 0})``."""
    values = {
        name: dataclasses.replace(getattr(config, name), **fields)
        if isinstance(fields, dict)
        else fields
        for name, fields in sections.items()
    }
    return dataclasses.replace(config, **{"dump_folder": str(folder), **values})


def refusal(config, world_size, **options) -> str:
    with pytest.raises(ConfigError) as refused:
        check_configuration(config, world_size, **options)
    return str(refused.value).replace(config.dump_folder, "RUN")
