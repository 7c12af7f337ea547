from comm_utils.fast_path import FastPath, FastPathCache


def takes(*_: object) -> bool:
    return True


def test_a_fast_path_is_kept_unless_the_cache_is_emptied_while_it_is_made() -> None:
    cache = FastPathCache()

    def emptied() -> FastPath:
        cache.clear()
        return takes

    for async_op, kept in ((False, cache.synchronous), (True, cache.asynchronous)):
        cache.keep(("barrier", None, None), async_op, emptied)
        assert not kept
        cache.keep(("barrier", None, None), async_op, lambda: takes)
        assert kept == {("barrier", None, None): takes}
    cache.clear()
    assert not cache.asynchronous
