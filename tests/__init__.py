"""Tests. A package, so that they share cases, tolerances and the ahead-of-time compile by name."""
