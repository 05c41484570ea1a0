"""What counts as a kernel's own files, and what as installed."""

import os
import sys
import sysconfig

import torch

from ffncli.run.user import surroundings


def test_packages_beside_torch_are_installed_wherever_they_are(monkeypatch, tmp_path):
    """As with packages in a folder that only PYTHONPATH names."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    monkeypatch.setattr(sysconfig, "get_paths", dict)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(surroundings.site, "getsitepackages", list)
    monkeypatch.setattr(surroundings, "_SYSTEM", ())
    assert any(os.path.realpath(torch.__file__).startswith(folder) for folder in surroundings._installed())
