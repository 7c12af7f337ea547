/* What oneCCL's archive asks of libraries that this package does without, so that the shared library needs none of
 * them.
 *
 * Memory: Intel's compiler calls its own names for memcpy and memset.
 * Tracing (__itt_*): pointers that a collector would set; null means that nobody traces.
 * hwloc: hwloc_topology_init fails, upon which oneCCL goes on without knowing NUMA nodes, and of hwloc calls no more
 * than what gives back the topology and the bitmap that it does not have; the others are here because the linker asks
 * for them.
 *
 * exports.map hides all of them: an MPI in the same process finds its own hwloc. */

#include <stddef.h>
#include <string.h>

/* NOLINTBEGIN(bugprone-reserved-identifier): the names are Intel's. */
void *_intel_fast_memcpy(void *to, const void *from, size_t size_bytes) { return memcpy(to, from, size_bytes); }
void *_intel_fast_memset(void *to, int byte, size_t size_bytes) { return memset(to, byte, size_bytes); }
/* NOLINTEND(bugprone-reserved-identifier) */

#define NOBODY_TRACES(name) void *name##_ptr__3_0 = NULL;
NOBODY_TRACES(__itt_domain_create)
NOBODY_TRACES(__itt_event_create)
NOBODY_TRACES(__itt_event_end)
NOBODY_TRACES(__itt_event_start)
NOBODY_TRACES(__itt_metadata_add)
NOBODY_TRACES(__itt_string_handle_create)
NOBODY_TRACES(__itt_task_begin)
NOBODY_TRACES(__itt_task_end)
NOBODY_TRACES(__itt_thread_set_name)

#define FAILS(name) \
    int name(void) { return -1; }
FAILS(hwloc_topology_init)
FAILS(hwloc_topology_load)
FAILS(hwloc_topology_set_io_types_filter)
FAILS(hwloc_bitmap_first)
FAILS(hwloc_bitmap_next)
FAILS(hwloc_bitmap_only)
FAILS(hwloc_bitmap_taskset_snprintf)
FAILS(hwloc_free)
FAILS(hwloc_get_area_membind)
FAILS(hwloc_get_proc_cpubind)
FAILS(hwloc_get_type_depth)
FAILS(hwloc_memattr_get_value)
FAILS(hwloc_obj_attr_snprintf)
FAILS(hwloc_obj_type_snprintf)
FAILS(hwloc_set_membind)

/* These answer yes or no. */
#define NO(name) \
    int name(void) { return 0; }
NO(hwloc_bitmap_isincluded)
NO(hwloc_bitmap_isset)
NO(hwloc_bitmap_iszero)

#define NOTHING(name) \
    void *name(void) { return NULL; } /* NOLINT(bugprone-macro-parentheses): a name is declared. */
NOTHING(hwloc_alloc_membind)
NOTHING(hwloc_bitmap_alloc)
NOTHING(hwloc_get_obj_by_depth)
NOTHING(hwloc_topology_get_support)

#define IGNORED(name) \
    void name(void) {}
IGNORED(hwloc_bitmap_free)
IGNORED(hwloc_bitmap_zero)
IGNORED(hwloc_topology_destroy)
