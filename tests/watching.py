"""A cluster that is watched: what it says, and what happens to it once a step was trained."""

import threading

from hotrow.train.logs import RunFolder


class Watching:
    """Mixed into a cluster. `acts` are what is done, `act(cluster)`, and when: a step was logged or a text was said."""

    def __init__(self, run, acts=(), **settings):
        self.heard, self.acts = [], list(acts)
        super().__init__(run, say=self.hear, **settings)
        self.metrics_file = RunFolder(run.output.folder).metrics

    def hear(self, text):
        self.heard.append(text)
        if self.acts and isinstance(self.acts[0][0], str) and self.acts[0][0] in text:
            self.acts.pop(0)[1](self)

    def up(self):
        watching = threading.Thread(target=self._watch, daemon=True)
        watching.start()
        try:
            return super().up()
        finally:
            self.acts = []
            watching.join(30)

    def _watch(self):
        while (acts := self.acts) and isinstance(acts[0][0], int):
            step, act = acts[0]
            lines = self.metrics_file.read_text() if self.metrics_file.exists() else ""
            if f'"kind": "train", "step": {step},' in lines:
                acts.pop(0)
                act(self)
