"""Metrics of `pdserve fleet` and `pdserve up`: the places for workers and what became of them."""

from __future__ import annotations

from pdserve.obs.catalogue.kinds import ROLE, Label, counter, gauge

SLOT_STATE = Label("state", ("waiting", "starting", "serving", "retiring"))

WANTED_WORKERS = gauge("pdserve_fleet_wanted_workers", "Workers that there should be.", ROLE)
WORKERS = gauge("pdserve_fleet_workers", "Places for workers by what their worker does.", ROLE, SLOT_STATE)
RESTARTS = counter("pdserve_fleet_restarts", "Workers started again after they had died.", ROLE)

FLEET = (WANTED_WORKERS, WORKERS, RESTARTS)
