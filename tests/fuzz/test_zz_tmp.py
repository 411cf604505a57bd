import collections

from tests.fuzz import test_exchange_processes as t
from tests.fuzz.test_exchange_processes import test_any_words_of_a_node_are_followed_or_end_the_process as a
from tests.fuzz.test_exchange_processes import test_any_words_of_a_process_are_followed_or_end_it as b

C = collections.Counter()


def wrap(cls, name, asy=False):
    f = getattr(cls, name)
    if asy:

        async def g(self, *x):
            k = type(x[0]).__name__ if x else ""
            try:
                r = await f(self, *x)
            except BaseException as e:
                C[name, k, repr(e)[:110]] += 1
                raise
            C[name, k, "ok"] += 1
            return r
    else:

        def g(self, *x):
            try:
                r = f(self, *x)
            except BaseException as e:
                C[name, repr(e)[:110]] += 1
                raise
            C[name, str(r)[:100]] += 1
            return r

    setattr(cls, name, g)


wrap(t.Process, "hear", True)
wrap(t.Process, "still_exchanges", True)
wrap(t.Beside, "check_adopted")


def w2(self, number, frame, f=t.Beside.hear):
    try:
        k = type(t.processes.heard_of_process(frame)).__name__
    except Exception as e:
        k = repr(e)[:30]
    h = self.fleet._hear
    r = f(self, number, frame)
    C["hear", k, r] += 1
    return r


t.Beside.hear = w2
cr = t.check_result


def c2(r):
    C["result"] += 1
    cr(r)


t.check_result = c2
test_a = a
test_b = b


def test_z():
    for k, v in sorted(C.items(), key=lambda x: str(x)):
        print(v, k)
