"""A cluster that is watched: what it says, and what happens to it once a step was trained."""

import threading

from hotrow.train.logs import RunFolder


class Watching:
    """Mixed into a cluster. `acts` are pairs of a step and what is done when that step was logged: `act(cluster)`."""

    def __init__(self, run, acts=(), **settings):
        self.heard, self.acts = [], list(acts)
        super().__init__(run, say=self.heard.append, **settings)
        self.metrics_file = RunFolder(run.output.folder).metrics

    def up(self):
        watching = threading.Thread(target=self._watch, daemon=True)
        watching.start()
        try:
            return super().up()
        finally:
            self.acts = []
            watching.join(30)

    def _watch(self):
        while self.acts:
            step, act = self.acts[0]
            lines = self.metrics_file.read_text() if self.metrics_file.exists() else ""
            if f'"kind": "train", "step": {step},' in lines:
                self.acts.pop(0)
                act(self)
