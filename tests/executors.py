"""An executor that runs what it is given at once, in this process: a pool of processes would load torch anew."""

from concurrent.futures import Executor, Future


class Here(Executor):
    def __init__(self, *given: object, **named: object) -> None:
        pass

    def submit(self, call, /, *args, **kwargs):
        done: Future[object] = Future()
        done.set_result(call(*args, **kwargs))
        return done
