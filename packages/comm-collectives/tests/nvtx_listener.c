/* A tool that NVTX loads, for tests: writes what is pushed and popped to the file that NVTX_LISTENER_FILE names, as lines
   of what happened, domain and text, separated by tabs.

   The numbers are those of NVTX 3's interface for tools, in nvtxDetail/nvtxTypes.h: export table 1 has the tables of
   callbacks, of which 1 has the calls without a domain and 5 those with one. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void (*callback)(void);

typedef struct {
    size_t size;
    int (*table)(int module, callback ***callbacks, unsigned *count);
} tables;

typedef struct {
    uint16_t version, size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type, reserved;
    int64_t payload;
    int32_t message_type;
    const char *message;
} attributes;

enum { CALLBACKS = 1, WITHOUT_DOMAIN = 1, WITH_DOMAIN = 5 };
enum { PUSH = 9, POP = 11 };
enum { DOMAIN_PUSH = 4, DOMAIN_POP = 5, NAME_CATEGORY = 8, REGISTER_STRING = 10, CREATE_DOMAIN = 12 };
enum { ASCII = 1, REGISTERED = 3 };

static FILE *file;

static void say(const char *what, const void *domain, const char *text) {
    fprintf(file, "%s\t%s\t%s\n", what, domain ? (const char *)domain : "", text);
    fflush(file);
}

/* A handle is a copy of the name. Like the handles of every tool, it lives as long as the process. */
static void *create_domain(const char *name) { return strdup(name); }

static void *register_string(const void *domain, const char *text) {
    say("string", domain, text);
    return strdup(text);
}

static void name_category(const void *domain, uint32_t number, const char *name) {
    (void)number;
    say("category", domain, name);
}

static int domain_push(const void *domain, const attributes *found) {
    int known = found->message_type == ASCII || found->message_type == REGISTERED;
    say("push", domain, known ? found->message : "?");
    return 0;
}

static int domain_pop(const void *domain) {
    say("pop", domain, "");
    return 0;
}

static int push(const char *text) {
    say("push", NULL, text);
    return 0;
}

static int pop(void) {
    say("pop", NULL, "");
    return 0;
}

int InitializeInjectionNvtx2(const void *(*export_table)(uint32_t)) {
    const char *path = getenv("NVTX_LISTENER_FILE");
    const tables *found = export_table(CALLBACKS);
    callback **without, **with;
    unsigned count;
    if (!path || !found || !found->table(WITHOUT_DOMAIN, &without, &count) || !found->table(WITH_DOMAIN, &with, &count))
        return 0;
    if (!file && !(file = fopen(path, "w"))) return 0;
    *without[PUSH] = (callback)push;
    *without[POP] = (callback)pop;
    *with[DOMAIN_PUSH] = (callback)domain_push;
    *with[DOMAIN_POP] = (callback)domain_pop;
    *with[NAME_CATEGORY] = (callback)name_category;
    *with[REGISTER_STRING] = (callback)register_string;
    *with[CREATE_DOMAIN] = (callback)create_domain;
    return 1;
}
