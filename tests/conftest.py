"""Lets tests import the helpers that lie in the tests folder (`from zoo import zoo`)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
