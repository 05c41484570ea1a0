"""The FFN parameters of a catalog row as transformers builds the model of its fields, on the meta device.

Nothing is allocated; a model takes 0.1 to 4 s. `python -m tests.oracles.catalog_modules` builds all that `counts.RECENT`
names (`make catalog`) and prints those that differ.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ffncli.models import catalog
from ffncli.models.config.read import EXPERT_FIELDS
from tests.oracles.counts import RECENT
