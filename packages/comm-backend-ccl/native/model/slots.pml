/* When a slot is written and read: every mixture of operations, one after the other without an end.
 *
 * Words, operations and slots are counted from the slowest rank, so that the states are finitely many although the
 * program is not. Words only grow, and what a rank waits for stays true once it is; so looking at all words at once
 * allows the same as looking at one after the other. Of the moments at which memory can be touched, the model has those
 * that matter: the first at which a slot may be written, and any, up to the post, at which it is read. On x86 data are
 * seen in the order of the stores, and the exchange of the word comes after them.
 *
 * What holds with SLOTS slots, holds with more: a step's data are read before its readers have posted three steps
 * (asserted in `read`, where SLOTS does not occur), and step c overwrites step c - SLOTS. SLOTS only says how far ranks
 * come apart, and 4 (with WINDOW 3) already lets one be a step ahead of those who have not looked yet.
 */

#ifndef RANKS
#define RANKS 2
#endif
#ifndef SLOTS
#define SLOTS 4
#endif
/* of free_at: step c is written when all others have posted c - SLOTS + WINDOW steps */
#ifndef WINDOW
#define WINDOW 3
#endif
/* ranks that can be a root; the others are alike */
#ifndef ROOTS
#define ROOTS 2
#endif
#ifndef CHUNKS
#define CHUNKS 2
#endif
/* operations between the slowest rank and the fastest */
#define AHEAD (SLOTS - WINDOW + 4)
/* as 16 is to 8 */
#define RECORDS (2 * SLOTS)

#define bit(rank) (1 << (rank))
#define others(rank) (((1 << RANKS) - 1) & ~bit(rank))

mtype = {
    short_all, /* all_reduce, all_gather, reduce_scatter, all_to_all, barrier */
    short_from, /* broadcast, scatter: the root waits for nobody */
    short_to, /* gather, reduce: only the root waits */
    two_all, two_from, two_to, /* chunks in two stages; _to is gather */
    three_all, three_to, /* all_reduce and reduce */
    direct_all, direct_from
}

/* The operations that some rank has begun and not all have ended, from the oldest. */
mtype kind[AHEAD];
byte root[AHEAD];
byte chunks[AHEAD];
byte known;

byte ended[RANKS]; /* operations */
byte done[RANKS]; /* the words: steps */
byte phase; /* of the slots: where `done` 0 is */
byte inside; /* ranks that have begun the operation after those that they ended, as a mask */

/* Who has not yet read what a rank's slot holds. In three stages a rank's result has a part of its own. */
byte unread[RANKS * SLOTS * 2];
#define shown 0
#define result 1
#define place(part, rank, step) (((rank) * SLOTS + (phase + (step) + SLOTS) % SLOTS) * 2 + part)

#if RANKS == 2
#define nobody_at_0(what) (what[0] > 0 && what[1] > 0)
#define all_others(me, least) (done[1 - me] >= (least))
#else
#define nobody_at_0(what) (what[0] > 0 && what[1] > 0 && what[2] > 0)
#define all_others(me, least) (done[(me + 1) % 3] >= (least) && done[(me + 2) % 3] >= (least))
#endif

#define op kind[ended[me]]
#define its_root root[ended[me]]
#define its_chunks chunks[ended[me]]
#define from(what) (what == short_from || what == two_from || what == direct_from)
#define to(what) (what == short_to || what == two_to)
#define three(what) (what == three_all || what == three_to)
#define direct(what) (what == direct_all || what == direct_from)
#define is_short(what) (what == short_all || what == short_from || what == short_to)

#ifdef LATE_WINDOW
/* step 1 shows the first chunk, but is not yet known to be followed by a post */
#define asked_for_slot (next < posts && (is_short(op) || next != 1))
#else
#define asked_for_slot (next < posts)
#endif

/* the words say that step `next`, after the first, can be done */
#define root_is_ready (me == its_root || done[its_root] >= done[me])
#define ready_at_end_of_direct ((from(op) && me != its_root) || all_others(me, done[me]))
#define ready_otherwise ((to(op) && me != its_root) || (from(op) && root_is_ready) || (!from(op) && all_others(me, done[me])))
#define ready (direct(op) && next == 2 -> ready_at_end_of_direct : ready_otherwise)

inline choose() {
    if
    :: kind[known] = short_all
    :: kind[known] = short_from
    :: kind[known] = short_to
    :: kind[known] = two_all
    :: kind[known] = two_from
    :: kind[known] = two_to
#ifndef WITHOUT_THREE_STAGES
    :: RANKS > 2 -> kind[known] = three_all
    :: kind[known] = three_to
#endif
    :: kind[known] = direct_all
    :: kind[known] = direct_from
    fi;
    if
    :: kind[known] != short_all && kind[known] != two_all && kind[known] != three_all && kind[known] != direct_all ->
        select(i : 0 .. ROOTS - 1);
        root[known] = i
    :: else
    fi;
    if
    :: kind[known] == two_all -> select(i : 0 .. CHUNKS) /* nothing at all, of all_to_all_v */
    :: kind[known] == two_from || kind[known] == two_to || three(kind[known]) -> select(i : 1 .. CHUNKS)
    :: else -> i = 0
    fi;
    chunks[known] = i;
    known++;
    i = 0
}

/* Reads what `other` has shown or reduced at step `step`. */
inline read(part, other, step) {
    assert(unread[place(part, other, step)] & bit(me)); /* it is there, and still is */
    assert(done[me] - (step) < 3); /* whatever SLOTS is */
    unread[place(part, other, step)] = unread[place(part, other, step)] & ~bit(me)
}

inline read_all(part, step) {
    i = 0;
    do
    :: i < RANKS && i != me -> read(part, i, step); i++
    :: i == me -> i++
    :: i == RANKS -> break
    od;
    i = 0
}

inline show_part(readers) {
    assert(unread[place(shown, me, done[me])] == 0);
    assert(unread[place(result, me, done[me])] == 0);
    unread[place(shown, me, done[me])] = readers
}

/* the reduced part, to the slot of the step before */
inline show_result(readers) {
    assert(unread[place(result, me, done[me] - 1)] == 0);
    unread[place(result, me, done[me] - 1)] = readers
}

proctype Rank(byte me) {
    byte i, next, steps, posts, base;

    do
    :: d_step {
            /* begin() writes the record before it is known whether a slot is free */
            true ->
            assert(ended[me] < AHEAD - 1 && (WINDOW < 3 || ended[me] < RECORDS))
        };
        atomic {
            if
            :: ended[me] == known -> choose()
            :: else
            fi
        };
        d_step {
            inside = inside | bit(me);
            if
            :: is_short(op) ->
                posts = 1;
                steps = ((from(op) && me == its_root) || (to(op) && me != its_root) -> 1 : 2)
            :: direct(op) -> posts = 2; steps = 3
            :: else ->
                steps = 1 + its_chunks + (three(op) -> 2 : 1);
                posts = steps - 1
            fi
        };
        do
        :: atomic {
                (next < steps && (!asked_for_slot || all_others(me, done[me] + WINDOW - SLOTS)) && (next == 0 || ready)) ->
                /* a word that posts follow is `done`; one more step waits at the end */
                d_step {
                    if
                    :: next < posts && !direct(op) && (is_short(op) || (next >= 1 && next <= its_chunks)) ->
                        if
                        :: from(op) && me == its_root -> show_part(others(me))
                        :: to(op) && me != its_root -> show_part(bit(its_root))
                        :: !from(op) && !to(op) -> show_part(others(me))
                        :: else
                        fi
                    :: else
                    fi
                }
            }
            d_step {
                true ->
                if
                :: direct(op) && next == 1 ->
                    /* others' tensors: they are in this operation, and have said so */
                    i = 0;
                    do
                    :: i < RANKS && i != me && (!from(op) || (i == its_root && me != its_root)) ->
                        assert(ended[i] == ended[me] && (inside & bit(i)) && done[i] >= done[me]);
                        i++
                    :: i == RANKS -> break
                    :: else -> i++
                    od;
                    i = 0
                :: !direct(op) && next >= 1 && (is_short(op) || (next >= 2 && next <= its_chunks + 1)) ->
                    if
                    :: from(op) && me != its_root -> read(shown, its_root, done[me] - 1)
                    :: to(op) && me == its_root -> read_all(shown, done[me] - 1)
                    :: !from(op) && !to(op) -> read_all(shown, done[me] - 1)
                    :: else
                    fi;
                    if
                    :: op == three_all -> show_result(others(me))
                    :: op == three_to && me != its_root -> show_result(bit(its_root))
                    :: else
                    fi
                :: else
                fi;
                if
                :: three(op) && next >= 3 && (op == three_all || me == its_root) -> read_all(result, done[me] - 2)
                :: else
                fi;
                if
                :: next < posts -> done[me]++
                :: else
                fi;
                next++;
                if
                :: nobody_at_0(done) ->
                    i = 0;
                    do
                    :: i < RANKS -> done[i]--; i++
                    :: else -> break
                    od;
                    i = 0;
                    phase = (phase + 1) % SLOTS
                :: else
                fi
            }
        :: d_step {
                next == steps ->
                next = 0;
                steps = 0;
                posts = 0;
                inside = inside & ~bit(me);
                ended[me]++;
                if
                :: nobody_at_0(ended) ->
                    i = 0;
                    do
                    :: i < RANKS -> ended[i]--; i++
                    :: else -> break
                    od;
                    i = 0;
                    do
                    :: i + 1 < known -> kind[i] = kind[i + 1]; root[i] = root[i + 1]; chunks[i] = chunks[i + 1]; i++
                    :: else -> break
                    od;
                    known--;
                    kind[known] = 0;
                    root[known] = 0;
                    chunks[known] = 0;
                    i = 0
                :: else
                fi
            };
            break
        od
    od
}

init {
    byte rank;
    atomic {
        do
        :: rank < RANKS -> run Rank(rank); rank++
        :: else -> break
        od;
        rank = 0
    }
}
