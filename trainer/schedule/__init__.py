"""Schedules: who samples and who learns when."""
