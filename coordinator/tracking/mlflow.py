"""MLflow: curves are metrics, named `run/...` and `sites/NAME/...`; settings are parameters."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.coordinator.tracking.feed import MissingLibrary
from atoll.coordinator.tracking.tracker import About, Point, flat

MAX_METRICS, MAX_PARAMS = 1_000, 100
"""Of one request (MLflow's REST API, "log-batch")."""
MAX_PARAM_CHARACTERS = 500
RUN_TAG = "atoll.run_id"


class MlflowTracker:
    """A later start of the coordinator goes on with the run of that tag."""

    def __init__(self, uri: str, project: str, about: About) -> None:
        try:
            from mlflow.entities import Metric, Param
            from mlflow.tracking import MlflowClient
        except ImportError as error:
            raise MissingLibrary(f"pip install 'atoll[mlflow]' ({error})") from None
        self._metric = Metric
        self._client = MlflowClient(tracking_uri=uri)
        found = self._client.get_experiment_by_name(project)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(project)
        runs = self._client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{about.run_id}'", max_results=1)
        if runs:
            self._run_id = runs[0].info.run_id
            self._client.set_terminated(self._run_id, "RUNNING")
            return
        run = self._client.create_run(experiment, run_name=about.run_id, tags={RUN_TAG: about.run_id})
        self._run_id = run.info.run_id
        said = [Param(key, str(value)[:MAX_PARAM_CHARACTERS]) for key, value in flat(about.settings).items()]
        for first in range(0, len(said), MAX_PARAMS):
            self._client.log_batch(self._run_id, params=said[first : first + MAX_PARAMS])

    def write(self, points: Sequence[Point]) -> None:
        metrics = [self._metric(p.name, p.value, round(1000 * p.time_s), p.step) for p in points]
        for first in range(0, len(metrics), MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[first : first + MAX_METRICS])

    def close(self) -> None:
        self._client.set_terminated(self._run_id)
