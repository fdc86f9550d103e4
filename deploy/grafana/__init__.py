"""Grafana dashboards: written in `boards`, turned into Grafana's JSON by `panels`; `python -m deploy.grafana` writes
them to `dashboards/`."""
