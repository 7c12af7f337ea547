/* Data and flags on a processor that reorders memory: nobody reads what is not there yet, or not there any more.
 *
 * The other models let each access happen in the order of the program, but for x86's store buffer. Here, accesses to
 * data are only begun in that order. A store becomes visible, and a load takes its value, at any later moment and in
 * any order with others, unless something keeps them apart:
 *
 * - a word that is written with release becomes visible after all that its rank did before;
 * - a word that is read with acquire is read before all that its rank does afterwards. Otherwise a load may take its
 *   value before the word is looked at, as the processor guesses that it will be right;
 * - a store never happens before a load that decides whether it happens at all;
 * - x86's non-temporal stores (STREAMED) are not kept by the release, but only by the fence before it.
 *
 * A store that is visible to one rank is visible to all, as on x86 and ARMv8. Ranks do STEPS steps of operations in
 * which all show their data to all, in SLOTS slots. For these alone, free_at takes 2 instead of 3, as slots.pml says.
 */

#define SLOTS 2
#ifndef STEPS
#define STEPS 5
#endif
#define RANKS 2
#define other (1 - me)
#define at(rank, step) ((rank) * SLOTS + (step) % SLOTS)

byte word[RANKS];
byte slot[RANKS * SLOTS]; /* the step whose data are there, from 1 */

/* Begun and not yet done: what is stored into a slot, and which step's data a rank loads from the other's slot. */
byte storing[RANKS * SLOTS];
byte loading[RANKS * SLOTS];

/* what rank `me` has begun is done */
#define stored (storing[at(me, 0)] == 0 && storing[at(me, 1)] == 0)
#define loaded (loading[at(other, 0)] == 0 && loading[at(other, 1)] == 0)

#ifdef GIVE_UP
/* Who gives up says so, and only then uses its tensor for something else. A rank that has read the tensor looks at the
 * failure afterwards: if there is none, what it read is right. */
byte tensor = 1;
bit failure, is_failing, is_overwriting;
byte found;
bit is_loading;

proctype Gives_up() {
    is_failing = 1;
#ifndef NO_FENCE_AFTER_FAILURE
    failure;
#endif
    is_overwriting = 1
}

proctype Reads() {
    bit failed;
    is_loading = 1;
#ifndef NO_FENCE_BEFORE_FAILURE
    !is_loading;
#endif
    failed = failure;
    !is_loading;
    assert(failed || found == 1)
}

proctype Memory() {
end:
    do
    :: atomic { is_failing && !failure -> failure = 1 }
    :: atomic { is_overwriting && tensor == 1 -> tensor = 2 }
    :: atomic { is_loading -> found = tensor; is_loading = 0 }
    od
}

init { atomic { run Gives_up(); run Reads(); run Memory() } }

#else

/* Until the other has done `steps` steps */
inline look(steps) { word[other] >= (steps) }

proctype Rank(byte me) {
    byte step, guess;

    do
    :: step < STEPS ->
        /* free_at */
        look(step + 2 - SLOTS);
        storing[at(me, step)] = step + 1;
#if defined(STREAMED) && !defined(NO_SFENCE)
        stored;
#endif
        atomic {
#if defined(NO_RELEASE)
            true
#elif defined(ONLY_STORES)
            stored
#elif defined(STREAMED)
            loaded
#else
            stored && loaded
#endif
            -> word[me] = step + 1
        };
#ifdef NO_ACQUIRE
        if
        :: guess = slot[at(other, step)]
        :: true
        fi;
#endif
        look(step + 1);
        if
        :: guess != 0 -> assert(guess == step + 1); guess = 0
        :: else -> loading[at(other, step)] = step + 1
        fi;
        step++
    :: else -> break
    od
}

/* Stores become visible, and loads take what is there. A rank's own stores and loads of one place stay in order: it
 * never stores where it loads, and it stores into a slot again after all have seen the word of the step before. */
proctype Memory() {
    byte i;
end:
    do
    :: atomic { storing[0] != 0 -> slot[0] = storing[0]; storing[0] = 0 }
    :: atomic { storing[1] != 0 -> slot[1] = storing[1]; storing[1] = 0 }
    :: atomic { storing[2] != 0 -> slot[2] = storing[2]; storing[2] = 0 }
    :: atomic { storing[3] != 0 -> slot[3] = storing[3]; storing[3] = 0 }
    :: atomic { loading[0] != 0 -> assert(slot[0] == loading[0]); loading[0] = 0 }
    :: atomic { loading[1] != 0 -> assert(slot[1] == loading[1]); loading[1] = 0 }
    :: atomic { loading[2] != 0 -> assert(slot[2] == loading[2]); loading[2] = 0 }
    :: atomic { loading[3] != 0 -> assert(slot[3] == loading[3]); loading[3] = 0 }
    od
}

init { atomic { run Rank(0); run Rank(1); run Memory() } }
#endif
