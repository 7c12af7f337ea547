/* Posting, sleeping and waking: whoever waits goes on in the end.
 *
 * Every access to what ranks share is a step of its own; so are those to `lock_` and `sleep_mutex_`. Stores that are not locked
 * instructions wait in the thread's store buffer, as on x86, until the thread's next locked instruction or any moment
 * before it. A rank does OPERATIONS operations, one step each, of kinds that are chosen at first; a step of an operation
 * in chunks waits as one of these. Threads look once before they sleep: spinning is looking more often.
 *
 * With WEAK, memory is that of ARMv8 in what matters here: taking and leaving a lock keeps nothing in order that others
 * see without the lock, and later loads may pass the store of a locked instruction, unless they are seq_cst as those of
 * post() are. Then only the fence is between setting the bit and the look.
 *
 * `rings` is not counted. What matters is whether it changed since a thread read it.
 */

#ifndef RANKS
#define RANKS 2
#endif
#ifndef OPERATIONS
#define OPERATIONS 3
#endif
#ifndef SLOTS
#define SLOTS 4
#endif
#define WINDOW 3

/* A second thread of rank 0: */
#define another_caller 1 /* waits for the last operation */
#define worker 2 /* the thread that looks after what nobody waits for */
#define receiver 3 /* waits for a message of rank 1 */
#ifndef SECOND
#define SECOND 0
#endif

#define THREADS (RANKS + 1)
#define bit(rank) (1 << (rank))
#define needs_all 128

mtype = { of_all, from_0, to_1 }
mtype kind[OPERATIONS];

/* What ranks share. */
byte word[RANKS];
byte shown[RANKS]; /* the data, of which the last step */
byte awaited[RANKS];
byte sleeping;
bit sent;

mtype = { to_shown, to_word, to_sleeping }
chan stores[THREADS] = [2] of { mtype, byte };

/* Of a thread in sleep(): has read `rings`; they rang since; is in the kernel. */
mtype = { up, has_read, rang, asleep }
mtype sleep_state[THREADS] = up;
#define rank_of(thread) (thread < RANKS -> thread : 0)

/* Of each rank, guarded by its lock. */
bit lock[RANKS];
byte started[RANKS];
byte completed[RANKS];
byte done[RANKS];
byte awaits[RANKS]; /* of the operation at the head */
bit received;

bit sleep_mutex[RANKS];
byte sleepers[RANKS];

bit has_work;
byte attended;

#ifdef DATA
#define assert_shown(what) assert(what)
#else
#define assert_shown(what) skip
#endif

/* Rank 1 begins its last operation when another thread of rank 0 has told it, by other means, that it was woken. */
bit told;

#define drained empty(stores[thread])

#ifdef WEAK
/* of one thread a rank */
inline take_lock(what) { skip }
inline give_lock(what) { skip }
#elif SECOND
inline take_lock(what) { atomic { drained && !what -> what = 1 } }
inline give_lock(what) { atomic { drained -> what = 0 } }
#else
/* nobody else takes it: what is left is that it drains */
inline take_lock(what) { drained }
inline give_lock(what) { drained }
#endif

inline ring(other) {
    d_step {
        drained ->
        if
        :: sleep_state[other] == has_read -> sleep_state[other] = rang
        :: else
        fi;
        if
        :: other == 0 && sleep_state[RANKS] == has_read -> sleep_state[RANKS] = rang
        :: else
        fi
    };
    /* FUTEX_WAKE */
    d_step {
        true ->
        if
        :: sleep_state[other] == asleep -> sleep_state[other] = up
        :: else
        fi;
        if
        :: other == 0 && sleep_state[RANKS] == asleep -> sleep_state[RANKS] = up
        :: else
        fi
    }
}

/* Group::post and wake_sleepers */
inline post() {
    done[me]++;
#ifdef DATA
    stores[thread] ! to_shown(done[me]);
#endif
#ifdef PLAIN_STORE
    stores[thread] ! to_word(done[me]);
#else
    atomic { drained -> word[me] = done[me] };
#endif
    if
    :: (sleeping & ~bit(me)) != 0 ->
        seen = sleeping;
        other = 0;
        do
        :: atomic { other < RANKS && (other == me || !(seen & bit(other))) -> other++ }
        :: other < RANKS && other != me && (seen & bit(other)) ->
            wanted = awaited[other];
            one = 0;
            do
            :: !(wanted & needs_all) || one == RANKS -> enough = 1; break
            :: (wanted & needs_all) && one < RANKS && one != other &&
                (one == me -> done[me] : word[one]) < (wanted & 127) -> break
            :: else -> one++
            od;
            if
            :: enough -> ring(other)
            :: else
            fi;
            atomic { enough = 0; wanted = 0; one = 0; other++ }
        :: other == RANKS -> break
        od;
        atomic { seen = 0; other = 0 }
    :: else
    fi
}

#define waits_for_all(number) (kind[number] == of_all || (kind[number] == to_1 && me == 1))
#define waits_for_0(number) (kind[number] == from_0 && me != 0)

/* Group::advance_all, whose caller holds the lock */
inline advance_all() {
    do
    :: completed[me] == started[me] -> break
    :: else ->
        if
        :: done[me] == completed[me] -> /* its step is to be done */
            other = 0;
            do
            :: other < RANKS && (other == me || word[other] + SLOTS >= done[me] + WINDOW) -> other++
            :: other == RANKS -> break
            :: else -> awaits[me] = done[me] + WINDOW - SLOTS; break
            od;
            if
            :: other < RANKS -> other = 0; break
            :: else -> other = 0
            fi;
            post()
        :: else
        fi;
        if
        :: waits_for_all(completed[me]) ->
            awaits[me] = done[me];
            do
            :: other < RANKS && (other == me || word[other] >= done[me]) ->
                assert_shown(other == me || shown[other] >= done[me]);
                other++
            :: other == RANKS -> break
            :: else -> break
            od;
            if
            :: other < RANKS -> other = 0; break
            :: else -> other = 0
            fi
        :: waits_for_0(completed[me]) ->
            awaits[me] = 0;
            if
            :: word[0] >= done[me] -> assert_shown(shown[0] >= done[me])
            :: else -> break
            fi
        :: else
        fi;
        atomic { completed[me]++; awaits[me] = 0; ended = 1 }
    od;
#if SECOND == receiver
    if
    :: me == 0 && sent && !received -> received = 1; ended = 1
    :: else
    fi;
#endif
    if
#ifndef NO_LOCAL_WAKE
    :: ended && (sleeping & bit(me)) -> ring(me)
#endif
    :: else
    fi;
    ended = 0
}

#define is_over (it == OPERATIONS -> received : completed[me] > it)
/* what posts the rank asks to be woken for */
#ifdef AWAIT_OWN
#define awaited_now (it == OPERATIONS || completed[me] > it -> 0 : it + 1)
#else
#define awaited_now (completed[me] == started[me] -> 0 : awaits[me])
#endif

/* Group::sleep, for operation `it`, or for the message where it is OPERATIONS */
inline sleep() {
#ifndef LATE_RINGS
    sleep_state[thread] = has_read;
#endif
    take_lock(lock[me]);
    if
    :: is_over -> give_lock(lock[me])
    :: else ->
        mine = awaited_now;
        give_lock(lock[me]);
        take_lock(sleep_mutex[me]);
        sleepers[me]++;
        if
#ifdef KEEP_AWAITED
        :: sleepers[me] > 1
#endif
        :: else -> atomic { drained -> awaited[me] = (mine -> needs_all | mine : 0) }
        fi;
#ifdef WEAK
        stores[thread] ! to_sleeping(bit(me));
#ifndef NO_FENCE
        drained;
#endif
#else
        atomic { drained -> sleeping = sleeping | bit(me) };
#endif
        give_lock(sleep_mutex[me]);
        take_lock(lock[me]);
#ifndef NO_RECHECK
        advance_all();
#endif
        go_on = (is_over || awaited_now != mine);
        give_lock(lock[me]);
        mine = 0;
#ifdef LATE_RINGS
        sleep_state[thread] = has_read;
#endif
        if
        :: go_on -> go_on = 0
        :: else ->
            /* FUTEX_WAIT compares and sleeps at once */
            if
            :: atomic { sleep_state[thread] == has_read -> sleep_state[thread] = asleep }
            :: sleep_state[thread] == rang
            fi;
            if
            :: sleep_state[thread] != asleep
            :: gives_up -> gives_up = 0; out_of_time = 1
            fi
        fi;
        take_lock(sleep_mutex[me]);
        sleepers[me]--;
        if
#ifdef CLEAR_BIT
        :: true
#else
        :: sleepers[me] == 0
#endif
            -> atomic { drained -> sleeping = sleeping & ~bit(me) }
        :: else
        fi;
        give_lock(sleep_mutex[me])
    fi;
    sleep_state[thread] = up
}

/* Group::wait */
inline wait() {
    attended = attended + (me == 0 && SECOND == worker);
    do
    :: is_over || out_of_time -> break
    :: else -> sleep()
    od;
    if
    :: me == 0 && SECOND == worker ->
        attended--;
        if
        :: attended == 0 ->
            take_lock(lock[me]);
            has_work = (has_work || completed[me] < started[me]);
            give_lock(lock[me])
        :: else
        fi
    :: else
    fi
}

inline start() {
    take_lock(lock[me]);
    started[me]++;
    advance_all();
    if
    :: me == 0 && SECOND == worker && completed[me] < started[me] -> has_work = 1
    :: else
    fi;
    give_lock(lock[me])
}

#define locals byte it, mine, seen, other, one, wanted; bit enough, ended, go_on, gives_up, out_of_time

proctype Caller(byte me) {
    locals;
    byte thread = me;

    if
    :: me == 0 && SECOND != 0 ->
        /* starts all */
        do
        :: started[me] < OPERATIONS -> start()
        :: else -> break
        od;
        if
        :: SECOND == worker -> gives_up = 1
        :: true
        fi;
        wait(); /* for the first */
        told = (told || SECOND == another_caller)
    :: else ->
        do
        :: it < OPERATIONS ->
            (it + 1 < OPERATIONS || me != 1 || told || SECOND == 0 || SECOND == worker);
            start();
            wait();
            it++
        :: else -> break
        od
    fi
}

/* The second thread of rank 0 */
proctype Second() {
    locals;
    byte thread = RANKS;
    byte me = 0;

#if SECOND == another_caller
    started[0] == OPERATIONS;
    it = OPERATIONS - 1;
    wait()
#elif SECOND == receiver
    it = OPERATIONS;
    wait();
    told = 1
#elif SECOND == worker
end:
    do
    :: atomic { has_work -> has_work = 0 };
        do
        :: take_lock(lock[me]);
            advance_all();
            if
            :: completed[0] == started[0] || attended > 0 -> give_lock(lock[me]); break
            :: else -> it = completed[0]; give_lock(lock[me])
            fi;
            sleep();
            it = 0
        od
    od
#endif
}

/* Rank 1 sends a message, at any time. */
proctype Sender() {
    byte thread = RANKS;
    sent = 1; /* a locked instruction, of a thread that has stored nothing before */
    if
#ifdef FILTER_MESSAGES
    :: (sleeping & bit(0)) && awaited[0] == 0 -> ring(0)
#else
    :: sleeping & bit(0) -> ring(0)
#endif
    :: else
    fi
}

/* Stores leave their buffers. */
#define leave(thread) \
    atomic { stores[thread] ? what(value) -> \
        if \
        :: what == to_shown -> shown[rank_of(thread)] = value \
        :: what == to_sleeping -> sleeping = sleeping | value \
        :: else -> word[rank_of(thread)] = value \
        fi; \
        what = 0; value = 0 }

proctype Memory() {
    mtype what;
    byte value;
end:
    do
    :: leave(0)
    :: leave(1)
    :: leave(2)
#if RANKS > 2
    :: leave(3)
#endif
    od
}

#ifdef SPURIOUS
/* Sleepers wake for no reason, until they do not any more. */
proctype Disturbance() {
    byte thread;
    do
    :: d_step { sleep_state[0] == asleep -> sleep_state[0] = up }
    :: d_step { sleep_state[1] == asleep -> sleep_state[1] = up }
    :: d_step { sleep_state[2] == asleep -> sleep_state[2] = up }
    :: break
    od
}
#endif

init {
    byte rank;
    atomic {
        do
        :: rank < OPERATIONS ->
            if
            :: kind[rank] = of_all
#ifndef OF_ALL
            :: kind[rank] = from_0
            :: kind[rank] = to_1
#endif
            fi;
            rank++
        :: else -> break
        od;
        rank = 0;
        do
        :: rank < RANKS -> run Caller(rank); rank++
        :: else -> break
        od;
        rank = 0;
        run Memory();
#if SECOND != 0
        run Second();
#endif
#if SECOND == receiver
        run Sender();
#endif
#ifdef SPURIOUS
        run Disturbance();
#endif
    };
    /* when nothing can happen any more */
    timeout ->
    do
    :: rank < RANKS -> assert(completed[rank] == OPERATIONS); rank++
    :: else -> break
    od;
    assert(SECOND != receiver || received)
}
