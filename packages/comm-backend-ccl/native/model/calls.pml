/* Calls that differ: whoever waits learns of it, nobody takes another call's data as its own, and nothing is reported
 * where calls agree.
 *
 * Each rank does OPERATIONS operations of its own choice, and then one in which all wait for all. A fingerprint, which
 * is a chained hash, is here the calls so far themselves. Sleeping and waking are of waking.pml: one flag, which a post
 * raises where what the rank awaits has come, and which with LOOKS may be raised for no reason, as by spinning.
 */

#ifndef RANKS
#define RANKS 2
#endif
#ifndef OPERATIONS
#define OPERATIONS 2
#endif
#ifndef SLOTS
#define SLOTS 4
#endif
#define WINDOW 3
#define RECORDS (2 * SLOTS)

#define all 1
#define from_0 2
#define from_1 3
#define from_0_long 4 /* three steps */
#define calls 5
#define posts_of(call) (call == from_0_long -> 3 : 1)
#define root_of(call) (call == from_1 -> 1 : 0)

typedef Word { short fingerprint; byte steps }
Word word[RANKS];
typedef Record { byte number; short fingerprint }
typedef Records { Record at[RECORDS] }
Records records[RANKS];
bit failure;

bit rung[RANKS];
byte awaited[RANKS];

/* What ranks do not share: what is true. */
typedef Program { byte call[OPERATIONS + 2] }
Program called[RANKS];
bit differ;
byte ended; /* ranks that did all */
byte learnt; /* ranks that ended with a failure */

#if RANKS == 2
#define all_have(other, least) (word[1 - (other)].steps >= (least))
#else
#define all_have(other, least) (word[((other) + 1) % 3].steps >= (least) && word[((other) + 2) % 3].steps >= (least))
#endif

/* Group::has_come; leaves `come` */
inline has_come(other, least) {
    atomic { fingerprint = word[other].fingerprint; steps = word[other].steps };
    if
    :: fingerprint == mine -> come = (steps >= (least))
    :: fingerprint != mine && steps <= base -> come = 0
    :: else ->
        atomic { agrees = (records[other].at[number % RECORDS].number == number) };
        atomic { agrees = (agrees && records[other].at[number % RECORDS].fingerprint == mine) };
        if
        :: agrees -> come = 1
        :: else ->
            d_step {
                come = 0;
                failure = 1;
                assert(differ);
                i = 0;
                do
                :: i < RANKS -> rung[i] = 1; i++
                :: else -> break
                od;
                i = 0
            }
        fi
    fi;
    atomic { agrees = 0; fingerprint = 0; steps = 0 }
}

/* Takes the data of `other`: in a call that is its own, after calls that are its own. Operations on more than a slot
 * read the record here as well. */
inline take(other) {
    d_step {
        i = 1;
        do
        :: i <= number -> assert(called[me].call[i] == called[other].call[i]); i++
        :: else -> break
        od;
        i = 0;
        assert(other == me || records[other].at[number % RECORDS].number == number);
        assert(other == me || records[other].at[number % RECORDS].fingerprint == mine)
    }
}

proctype Rank(byte me) {
    byte number = 1, call, base, step, other, steps, i;
    short mine, fingerprint;
    bit come, agrees;

    do
    :: number <= OPERATIONS + 1 && !failure ->
        atomic {
            if
            :: number > OPERATIONS -> call = all
            :: number <= OPERATIONS -> call = all
            :: number <= OPERATIONS -> call = from_0
#ifndef FEW
            :: number <= OPERATIONS -> call = from_1
            :: number <= OPERATIONS -> call = from_0_long
#endif
            fi;
            called[me].call[number] = call;
            i = 0;
            do
            :: i < RANKS ->
                differ = (differ || (called[i].call[number] != 0 && called[i].call[number] != call));
                i++
            :: else -> break
            od;
            i = 0;
            mine = mine * calls + call;
            base = word[me].steps;
            step = 0
        };
#ifndef LATE_RECORD
        records[me].at[number % RECORDS].fingerprint = mine;
        records[me].at[number % RECORDS].number = number;
#endif
        do
        :: step <= posts_of(call) && !failure ->
            rung[me] = 0;
            awaited[me] = 0;
            if
            :: step < posts_of(call) && !all_have(me, word[me].steps + WINDOW - SLOTS) ->
                awaited[me] = word[me].steps + WINDOW - SLOTS;
                come = 0
            :: else ->
                come = 1;
                if
                :: step > 0 && call == all ->
                    awaited[me] = base + 1;
                    other = 0;
                    do
                    :: other < RANKS && other != me ->
                        has_come(other, base + 1);
                        if
                        :: come -> other++
                        :: else -> break
                        fi
                    :: other == me -> other++
                    :: other == RANKS -> break
                    od;
                    other = 0
                :: step > 0 && call != all && me != root_of(call) -> has_come(root_of(call), base + step)
                :: else
                fi
            fi;
            if
            :: come ->
                come = 0;
                if
                :: step > 0 && call == all ->
                    other = 0;
                    do
                    :: other < RANKS -> take(other); other++
                    :: else -> break
                    od;
                    other = 0
                :: step > 0 && call != all -> take(root_of(call))
                :: else
                fi;
                if
                :: step < posts_of(call) ->
                    atomic {
                        word[me].fingerprint = mine;
                        word[me].steps++;
                        i = 0;
                        do
                        :: i < RANKS -> rung[i] = (rung[i] || (i != me && (awaited[i] == 0 || all_have(i, awaited[i])))); i++
                        :: else -> break
                        od;
                        i = 0
                    }
                :: else
                fi;
#ifdef LATE_RECORD
                if
                :: step == 0 ->
                    records[me].at[number % RECORDS].fingerprint = mine;
                    records[me].at[number % RECORDS].number = number
                :: else
                fi;
#endif
                step++
            :: else ->
                (rung[me] || failure)
            fi
        :: else -> break
        od;
        number++
    :: else -> break
    od;
    atomic {
        awaited[me] = 0;
        ended++;
        learnt = learnt + failure
    }
}

/* Looks without having been woken, until there are no more. */
proctype Looks() {
    do
    :: rung[0] = 1
    :: rung[1] = 1
    :: break
    od
}

init {
    byte rank;
    atomic {
        do
        :: rank < RANKS -> run Rank(rank); rank++
        :: else -> break
        od;
        rank = 0;
#ifdef LOOKS
        run Looks()
#endif
    };
    timeout ->
    assert(ended == RANKS && differ == failure && learnt == (differ -> RANKS : 0))
}
