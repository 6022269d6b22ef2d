/* A CUDA driver in software: the calls of libcuda.so.1 that we use, with a card's meaning, on host memory and threads.

     cc -shared -fPIC -O2 -Wall -Wextra -Werror -pthread softcuda.c -o libcuda.so.1

   Real processes load it under LD_LIBRARY_PATH. What a card does late is done late here, by a thread per stream; what
   is an error there is one here; and what is undefined there is an error where that can be told. Compiled with
   -DWITH_CUDA_H, each prototype, number and structure is checked against CUDA's own header.

   What the environment says, once, at cuInit:
     SOFTCUDA_DIR             the folder that processes on the same cards share; /tmp/softcuda-UID
     SOFTCUDA_DEVICES         cards, 1
     SOFTCUDA_MEMORY          bytes of each, 256 MiB
     SOFTCUDA_SLOW_NS_PER_MB  how long copies take on top
     SOFTCUDA_FAIL            NAME:N:CODE, also several with commas: from its N-th time on, this process's call fails
     CUDA_VISIBLE_DEVICES     ordinals or GPU-UUIDs, as with NVIDIA's
   What a file in SOFTCUDA_DIR says, at any time; each name may end in .PID, and is then for that process alone:
     fail-NAME                the next such call fails with the code that is in the file, which goes
     hold-copies              no copy begins while there is this file

   Otherwise than on a card: the host can read and write a device's memory, where there is access; new memory is zeros;
   kernels are known by name, and are one thread; priorities are none, and copies have as many engines as there are
   streams; every card reaches every other's memory; an error of a context is the same for all that was in it. Times say
   nothing.

   The host's memory is the process's own affair: who unmaps what a stream still reads or writes dies of it, where on a
   card pinned pages would stay.

   Memory. An allocation is a file in SOFTCUDA_DIR/memory, and whoever has it open has it: a mapping, an exported
   descriptor and one under way in a socket are all the same open file, with a shared lock on it. A file that can be
   locked exclusively is nobody's, and is swept. So memory counts until the last process has let go of it, however it
   ended. */

#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* ---- the header, as far as it is needed ---- */

#define ERRORS(X) \
    X(CUDA_SUCCESS, 0, "no error") \
    X(CUDA_ERROR_INVALID_VALUE, 1, "invalid argument") \
    X(CUDA_ERROR_OUT_OF_MEMORY, 2, "out of memory") \
    X(CUDA_ERROR_NOT_INITIALIZED, 3, "initialization error") \
    X(CUDA_ERROR_DEINITIALIZED, 4, "driver shutting down") \
    X(CUDA_ERROR_NO_DEVICE, 100, "no CUDA-capable device is detected") \
    X(CUDA_ERROR_INVALID_DEVICE, 101, "invalid device ordinal") \
    X(CUDA_ERROR_INVALID_IMAGE, 200, "device kernel image is invalid") \
    X(CUDA_ERROR_INVALID_CONTEXT, 201, "invalid device context") \
    X(CUDA_ERROR_MAP_FAILED, 205, "mapping of buffer object failed") \
    X(CUDA_ERROR_NO_BINARY_FOR_GPU, 209, "no kernel image is available for execution on the device") \
    X(CUDA_ERROR_ECC_UNCORRECTABLE, 214, "uncorrectable ECC error encountered") \
    X(CUDA_ERROR_INVALID_PTX, 218, "a PTX JIT compilation failed") \
    X(CUDA_ERROR_NVLINK_UNCORRECTABLE, 220, "uncorrectable NVLink error detected during the execution") \
    X(CUDA_ERROR_OPERATING_SYSTEM, 304, "OS call failed or operation not supported on this OS") \
    X(CUDA_ERROR_INVALID_HANDLE, 400, "invalid resource handle") \
    X(CUDA_ERROR_NOT_FOUND, 500, "named symbol not found") \
    X(CUDA_ERROR_NOT_READY, 600, "device not ready") \
    X(CUDA_ERROR_ILLEGAL_ADDRESS, 700, "an illegal memory access was encountered") \
    X(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, 701, "too many resources requested for launch") \
    X(CUDA_ERROR_LAUNCH_TIMEOUT, 702, "the launch timed out and was terminated") \
    X(CUDA_ERROR_CONTEXT_IS_DESTROYED, 709, "context is destroyed") \
    X(CUDA_ERROR_ASSERT, 710, "device-side assert triggered") \
    X(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, 712, "part or all of the requested memory range is already mapped") \
    X(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, 713, "pointer does not correspond to a registered memory region") \
    X(CUDA_ERROR_HARDWARE_STACK_ERROR, 714, "hardware stack error") \
    X(CUDA_ERROR_ILLEGAL_INSTRUCTION, 715, "an illegal instruction was encountered") \
    X(CUDA_ERROR_MISALIGNED_ADDRESS, 716, "misaligned address") \
    X(CUDA_ERROR_INVALID_ADDRESS_SPACE, 717, "operation not supported on global/shared address space") \
    X(CUDA_ERROR_INVALID_PC, 718, "invalid program counter") \
    X(CUDA_ERROR_LAUNCH_FAILED, 719, "unspecified launch failure") \
    X(CUDA_ERROR_NOT_PERMITTED, 800, "operation not permitted") \
    X(CUDA_ERROR_NOT_SUPPORTED, 801, "operation not supported") \
    X(CUDA_ERROR_SYSTEM_NOT_READY, 802, "system not yet initialized") \
    X(CUDA_ERROR_UNKNOWN, 999, "unknown error")

#ifdef WITH_CUDA_H
#include <cuda.h>
#undef cuEventElapsedTime /* the older names, beside the newer ones */
#undef cuMemcpyBatchAsync
#else
#define LISTED(name, number, text) name = number,
typedef enum { ERRORS(LISTED) } CUresult;
#undef LISTED
typedef int CUdevice;
typedef int CUdevice_attribute;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUmemGenericAllocationHandle;
typedef int CUmemAllocationHandleType;
typedef int CUmemAllocationGranularity_flags;
typedef int CUjit_option;
typedef uint32_t cuuint32_t;
typedef uint64_t cuuint64_t;
typedef struct CUctx_st *CUcontext;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef void (*CUhostFn)(void *);
typedef struct {
    char bytes[16];
} CUuuid;
typedef struct {
    char reserved[64];
} CUipcMemHandle;
typedef struct {
    char reserved[64];
} CUipcEventHandle;
typedef struct {
    int type;
    int id;
} CUmemLocation;
typedef struct {
    int type;
    int requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    struct {
        unsigned char compressionType;
        unsigned char gpuDirectRDMACapable;
        unsigned short usage;
        unsigned char reserved[4];
    } allocFlags;
} CUmemAllocationProp;
typedef struct {
    CUmemLocation location;
    int flags;
} CUmemAccessDesc;
typedef struct {
    int srcAccessOrder;
    CUmemLocation srcLocHint;
    CUmemLocation dstLocHint;
    unsigned int flags;
} CUmemcpyAttributes;
#define CU_STREAM_LEGACY ((CUstream)0x1)
#define CU_MEMHOSTREGISTER_PORTABLE 1
#define CU_MEMHOSTREGISTER_DEVICEMAP 2
#define CU_LAUNCH_PARAM_END ((void *)0)
#define CU_LAUNCH_PARAM_BUFFER_POINTER ((void *)1)
#define CU_LAUNCH_PARAM_BUFFER_SIZE ((void *)2)
enum {
    CU_STREAM_NON_BLOCKING = 1,
    CU_EVENT_DISABLE_TIMING = 2,
    CU_EVENT_INTERPROCESS = 4,
    CU_STREAM_WAIT_VALUE_GEQ = 0,
    CU_STREAM_WAIT_VALUE_EQ = 1,
    CU_STREAM_WAIT_VALUE_AND = 2,
    CU_STREAM_WAIT_VALUE_NOR = 3,
    CU_STREAM_WAIT_VALUE_FLUSH = 1 << 30,
    CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER = 1,
    CU_MEM_ALLOCATION_TYPE_PINNED = 1,
    CU_MEM_LOCATION_TYPE_DEVICE = 1,
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1,
    CU_MEM_ACCESS_FLAGS_PROT_NONE = 0,
    CU_MEM_ACCESS_FLAGS_PROT_READ = 1,
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3,
    CU_MEMCPY_SRC_ACCESS_ORDER_STREAM = 1,
    CU_MEMCPY_SRC_ACCESS_ORDER_ANY = 3,
    CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS = 1,
};
#endif

#define HOLDS(name, number, text) _Static_assert((int)name == number, #name);
ERRORS(HOLDS)
#undef HOLDS
_Static_assert(sizeof(CUuuid) == 16 && sizeof(CUipcMemHandle) == 64 && sizeof(CUipcEventHandle) == 64, "identities");
_Static_assert(sizeof(CUmemAllocationProp) == 32 && offsetof(CUmemAllocationProp, location) == 8, "properties");
_Static_assert(offsetof(CUmemAllocationProp, allocFlags) == 24, "properties");
_Static_assert(sizeof(CUmemAccessDesc) == 12 && offsetof(CUmemAccessDesc, flags) == 8, "access");
_Static_assert(sizeof(CUmemcpyAttributes) == 24 && offsetof(CUmemcpyAttributes, flags) == 20, "attributes");
_Static_assert(sizeof(CUdeviceptr) == 8 && sizeof(CUmemGenericAllocationHandle) == 8 && sizeof(CUdevice) == 4, "words");
_Static_assert(CU_MEM_ACCESS_FLAGS_PROT_READWRITE == 3 && CU_STREAM_WAIT_VALUE_NOR == 3, "flags");

/* ---- what there is ---- */

#define MAX_DEVICES 16
#define MAX_PARAMS 8
#define MAX_STACK 64
#define GRANULARITY ((size_t)2 << 20)
#define PAGE ((size_t)4096)
#define CHUNK ((size_t)256 << 10) /* what a slow copy copies at a time, so that it can be caught halfway */
#define DRIVER_VERSION 13000

typedef struct Memory { /* a file of SOFTCUDA_DIR/memory */
    int fd;
    size_t num_bytes;
    int device;
    bool exportable;
    unsigned refs; /* handles and mappings */
    char name[40];
} Memory;

typedef struct Handle { /* what cuMemCreate and cuMemImportFromShareableHandle return: a number, never used again */
    struct Handle *next;
    unsigned long long number;
    Memory *memory;
} Handle;

typedef struct Reservation {
    struct Reservation *next;
    uintptr_t address;
    size_t num_bytes;
} Reservation;

typedef enum { MAPPED, ALLOCATED, OPENED, REGISTERED, HOST } RangeKind;

typedef struct Range { /* addresses that CUDA knows */
    struct Range *next;
    RangeKind kind;
    uintptr_t address;
    size_t num_bytes;
    Memory *memory;          /* of MAPPED, ALLOCATED and OPENED */
    CUcontext context;       /* of all but MAPPED, which are no context's */
    unsigned flags;          /* of REGISTERED */
    int access[MAX_DEVICES]; /* of MAPPED: what a device may do there */
    unsigned opened;         /* of OPENED: how often */
    unsigned users;          /* that run, and touch it */
    bool closing;            /* no one new may */
} Range;

typedef struct Marker { /* a point in a stream */
    unsigned refs;
    bool done, lost; /* lost: its context came to nothing before */
    uint64_t at_ns;
} Marker;

#define GENERATIONS 256 /* of one event that can be under way at once */

/* A file of SOFTCUDA_DIR/events, which processes map. All but `done` is under the account's lock. */
typedef struct SharedEvent {
    uint64_t recorded;
    struct {
        uint64_t done;     /* the last generation of this slot that is */
        uint64_t recorder; /* the process whose stream brings it */
    } slots[GENERATIONS];
} SharedEvent;

struct CUevent_st {
    CUevent next;
    CUcontext context;
    unsigned flags;
    Marker *marker;      /* of its last record; NULL: never */
    SharedEvent *shared; /* of INTERPROCESS, instead */
    uint64_t number;
    bool opened; /* is another process's */
};

typedef struct {
    uintptr_t dst, src;
    size_t num_bytes;
    Range *to, *from; /* while it runs; NULL: pageable */
} Copy;

typedef enum {
    COPIES,
    SET,
    WRITE_VALUE,
    WAIT_VALUE,
    RECORD,
    WAIT,
    RECORD_SHARED,
    WAIT_SHARED,
    KERNEL,
    HOST_FUNCTION
} OperationKind;

typedef struct Operation {
    struct Operation *next;
    OperationKind kind;
    uint64_t ticket; /* rises with each that is enqueued, in any stream */
    Marker *marker;
    SharedEvent *shared;
    uint64_t generation;
    uintptr_t address;
    uint64_t value;
    size_t count;
    unsigned width, flags;
    const struct Kernel *kernel;
    uint64_t arguments[MAX_PARAMS];
    CUhostFn function;
    void *data;
    size_t num_copies;
    Copy copies[];
} Operation;

struct CUstream_st {
    CUstream next;
    CUcontext context;
    unsigned flags;
    bool started, ended; /* ended: its handle is of no use, and its thread ends with its last operation */
    pthread_cond_t work;
    Operation *first, *last; /* the first one runs */
};

struct CUctx_st {
    CUcontext next;
    int device;
    unsigned retained;
    CUresult error; /* sticky */
    bool destroyed;
    CUstream streams; /* the last of them is stream 0 */
    struct CUstream_st legacy;
};

struct CUfunc_st {
    CUfunction next;
    CUmodule module;
    char name[128];
    unsigned num_params;
    unsigned sizes[MAX_PARAMS];
};

struct CUmod_st {
    CUmodule next;
    CUcontext context;
    CUfunction functions;
};

typedef struct {
    int number; /* of the card, which is not its ordinal where CUDA_VISIBLE_DEVICES says so */
    CUcontext context;
    CUresult error;
} Device;

typedef struct Failing {
    char name[64];
    unsigned long from, calls;
    CUresult code;
} Failing;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;  /* of all that is here; never held while work is done */
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER; /* something is over */
static enum { FRESH, READY, FORKED } stage = FRESH;
static char folder[512];
static int account_fd = -1, lease_fd = -1;
static uint64_t process; /* names the lease */
static Device devices[MAX_DEVICES];
static int num_devices;
static size_t budget;
static uint64_t slow_ns_per_mb;
static Failing failing[16];
static int num_failing;
static uint64_t tickets;
static unsigned long long last_handle;
static CUcontext contexts;
static Handle *handles;
static Reservation *reservations;
static Range *ranges, *last_found;
static CUevent events;
static CUmodule modules;
static __thread CUcontext current, below[MAX_STACK]; /* a thread's stack of contexts: its top, and what is under it */
static __thread unsigned num_below;
static __thread bool in_host_function;

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void sleep_ns(uint64_t ns) {
    struct timespec t = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
    while (nanosleep(&t, &t) && errno == EINTR) continue;
}

static void *made(size_t num_bytes) {
    void *it = calloc(1, num_bytes);
    if (!it) abort();
    return it;
}

static void set_text(char *to, size_t size, const char *text) {
    size_t length = strlen(text) < size ? strlen(text) : size - 1;
    memcpy(to, text, length);
    to[length] = 0;
}

static bool over(CUcontext context) { /* nothing more is done in it */
    return __atomic_load_n(&context->error, __ATOMIC_RELAXED) || __atomic_load_n(&context->destroyed, __ATOMIC_RELAXED);
}

static void fault(CUcontext context, CUresult code) {
    if (!context->error) __atomic_store_n(&context->error, code, __ATOMIC_RELAXED);
    devices[context->device].error = context->error; /* for ever: the process must end */
    pthread_cond_broadcast(&changed);
}

static bool is_fatal(CUresult code) { /* leaves a context of no use, by cuda.h */
    static const int codes[] = {214, 220, 700, 702, 710, 714, 715, 716, 717, 718, 719, 999};
    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++)
        if (codes[i] == (int)code) return true;
    return false;
}

/* ---- files ---- */

static void path_of(char *path, size_t size, const char *kind, const char *name) {
    if ((size_t)snprintf(path, size, "%s/%s/%s", folder, kind, name) >= size) abort();
}

static void numbered_path(char *path, size_t size, const char *kind, uint64_t number) {
    char name[32];
    snprintf(name, sizeof name, "%016llx", (unsigned long long)number);
    path_of(path, size, kind, name);
}

static void account_enter(void) {
    while (flock(account_fd, LOCK_EX) && errno == EINTR) continue;
}

static void account_leave(void) {
    flock(account_fd, LOCK_UN);
}

/* Whether someone has this file open with its lock; one that nobody has goes. Inside the account. */
static bool is_held(int at, const char *name) {
    int fd = openat(at, name, O_RDWR | O_CLOEXEC);
    if (fd < 0) return false;
    bool held = flock(fd, LOCK_EX | LOCK_NB) != 0;
    if (!held) unlinkat(at, name, 0);
    close(fd);
    return held;
}

static int card_of(const char *name) { /* an allocation's name begins with its card's number */
    int card = -1;
    return sscanf(name, "%d-", &card) == 1 ? card : -1;
}

/* Bytes of a card that processes have. Inside the account. */
static size_t live_bytes(int card) {
    char path[640];
    path_of(path, sizeof path, "memory", "");
    DIR *listing = opendir(path);
    size_t sum = 0;
    for (struct dirent *each; listing && (each = readdir(listing));) {
        struct stat about;
        if (card_of(each->d_name) != card || !is_held(dirfd(listing), each->d_name)) continue;
        if (!fstatat(dirfd(listing), each->d_name, &about, 0)) sum += (size_t)about.st_size;
    }
    if (listing) closedir(listing);
    return sum;
}

static bool is_alive(uint64_t of) {
    char path[640];
    numbered_path(path, sizeof path, "processes", of);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return false;
    bool alive = flock(fd, LOCK_SH | LOCK_NB) != 0;
    close(fd);
    return alive;
}

static uint64_t random_word(void) {
    uint64_t word = 0;
    if (getrandom(&word, sizeof word, 0) != sizeof word) abort();
    return word;
}

/* ---- memory ---- */

static CUresult memory_new(int device, size_t num_bytes, Memory **result) {
    Memory *memory = made(sizeof *memory);
    char path[640];
    memory->num_bytes = num_bytes;
    memory->device = device;
    memory->refs = 1;
    snprintf(memory->name, sizeof memory->name, "%d-%016llx", devices[device].number,
             (unsigned long long)random_word());
    path_of(path, sizeof path, "memory", memory->name);
    account_enter();
    CUresult code = CUDA_SUCCESS;
    if (num_bytes > budget || live_bytes(devices[device].number) > budget - num_bytes) code = CUDA_ERROR_OUT_OF_MEMORY;
    if (!code) {
        memory->fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        bool ok = memory->fd >= 0 && !flock(memory->fd, LOCK_SH | LOCK_NB) && !ftruncate(memory->fd, (off_t)num_bytes);
        if (!ok) code = CUDA_ERROR_OPERATING_SYSTEM;
    }
    account_leave();
    if (code) {
        free(memory);
        return code;
    }
    *result = memory;
    return CUDA_SUCCESS;
}

static void memory_drop(Memory *memory) {
    if (--memory->refs) return;
    char path[640];
    path_of(path, sizeof path, "memory", "");
    account_enter();
    close(memory->fd);
    int at = open(path, O_DIRECTORY | O_RDONLY | O_CLOEXEC);
    if (at >= 0) {
        is_held(at, memory->name); /* sweeps it, if it was the last one */
        close(at);
    }
    account_leave();
    free(memory);
}

static int device_of_card(int card) {
    for (int i = 0; i < num_devices; i++)
        if (devices[i].number == card) return i;
    return -1;
}

static Handle *handle_new(Memory *memory) {
    Handle *handle = made(sizeof *handle);
    handle->number = ++last_handle;
    handle->memory = memory;
    handle->next = handles;
    return handles = handle;
}

static Handle **handle_at(unsigned long long number) {
    Handle **at = &handles;
    while (*at && (*at)->number != number) at = &(*at)->next;
    return at;
}

/* ---- ranges ---- */

static bool has(const Range *range, uintptr_t address) {
    return address >= range->address && address - range->address < range->num_bytes;
}

static Range *range_of(uintptr_t address) {
    if (last_found && has(last_found, address)) return last_found;
    for (Range *each = ranges; each; each = each->next)
        if (has(each, address)) return last_found = each;
    return NULL;
}

static bool inside(const Range *range, uintptr_t address, size_t num_bytes) {
    return has(range, address) && num_bytes <= range->num_bytes - (address - range->address);
}

static bool overlap(uintptr_t address, size_t num_bytes, uintptr_t other, size_t other_bytes) {
    return other < address + num_bytes && address < other + other_bytes;
}

/* Whether anything of these addresses is CUDA's. */
static bool is_known(uintptr_t address, size_t num_bytes) {
    for (Range *each = ranges; each; each = each->next)
        if (overlap(address, num_bytes, each->address, each->num_bytes)) return true;
    for (Reservation *each = reservations; each; each = each->next)
        if (overlap(address, num_bytes, each->address, each->num_bytes)) return true;
    return false;
}

static bool is_process_memory(uintptr_t address, size_t num_bytes) {
    uintptr_t first = address & ~(uintptr_t)(PAGE - 1);
    return address && address + num_bytes > address && !msync((void *)first, address + num_bytes - first, MS_ASYNC);
}

static Range *range_new(RangeKind kind, uintptr_t address, size_t num_bytes, Memory *memory, CUcontext context) {
    Range *range = made(sizeof *range);
    range->kind = kind;
    range->address = address;
    range->num_bytes = num_bytes;
    range->memory = memory;
    range->context = context;
    range->next = ranges;
    return ranges = range;
}

/* Nobody new may touch it; those who do have ended. What is queued, and would, fails when it comes. */
static void range_close(Range *range) {
    range->closing = true;
    while (range->users) pthread_cond_wait(&changed, &lock);
    Range **at = &ranges;
    while (*at != range) at = &(*at)->next;
    *at = range->next;
    last_found = NULL;
}

/* Device memory at an address of our choice, with a page on both sides that nobody may touch. */
static uintptr_t memory_map(Memory *memory) {
    size_t whole = (memory->num_bytes + PAGE - 1) / PAGE * PAGE;
    char *base = mmap(NULL, whole + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) return 0;
    char *it = mmap(base + PAGE, whole, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, memory->fd, 0);
    if (it == MAP_FAILED) abort();
    madvise(it, whole, MADV_DONTFORK);
    return (uintptr_t)it;
}

static void range_free(Range *range) { /* one that range_close has closed */
    size_t whole = (range->num_bytes + PAGE - 1) / PAGE * PAGE;
    if (range->kind == ALLOCATED || range->kind == OPENED) munmap((char *)range->address - PAGE, whole + 2 * PAGE);
    if (range->kind == HOST) munmap((void *)range->address, whole);
    if (range->memory) memory_drop(range->memory);
    free(range);
}

/* The range where a device may do this to these bytes: its own memory, or host memory that is mapped for it. NULL:
   there is none. */
static Range *reach(CUcontext context, uintptr_t address, size_t num_bytes, int access) {
    Range *range = range_of(address);
    if (!range || range->closing || !inside(range, address, num_bytes)) return NULL;
    if (range->kind == MAPPED && (range->access[context->device] & access) != access) return NULL;
    if (range->kind == REGISTERED && !(range->flags & CU_MEMHOSTREGISTER_DEVICEMAP)) return NULL;
    return range;
}

typedef enum { NOWHERE, DEVICE_SIDE, PINNED_SIDE, PAGEABLE_SIDE } Side;

/* What a copy's side is. A copy stays inside one range, and so within one allocation or what was registered at once. (A
   card would let one run on over neighbouring mappings of a reservation.) */
static Side side_of(CUcontext context, uintptr_t address, size_t num_bytes, int access, Range **found) {
    Range *range = range_of(address);
    *found = NULL;
    if (!range) return !is_known(address, num_bytes) && is_process_memory(address, num_bytes) ? PAGEABLE_SIDE : NOWHERE;
    if (range->closing || !inside(range, address, num_bytes)) return NOWHERE;
    if (range->kind == MAPPED && (range->access[context->device] & access) != access) return NOWHERE;
    *found = range;
    if (range->kind == HOST) return PINNED_SIDE;
    if (range->kind != REGISTERED) return DEVICE_SIDE;
    bool pinned = range->context == context || (range->flags & CU_MEMHOSTREGISTER_PORTABLE);
    return pinned ? PINNED_SIDE : PAGEABLE_SIDE;
}

/* ---- kernels: what they do, by name ---- */

#define ONE (-1)
#define BASE (-2) /* the body looks how far it goes */
#define MAX_AREAS 4

typedef struct Run {
    CUcontext context;
    const uint64_t *arguments;
    Range *areas[MAX_AREAS];
} Run;

typedef struct Kernel {
    const char *name;
    unsigned num_params;
    unsigned num_areas;
    struct {
        unsigned pointer; /* the parameter with its address */
        int count;        /* the one with the number of its units, ONE or BASE */
        unsigned unit;    /* bytes, and its alignment */
        int access;
    } areas[MAX_AREAS];
    bool (*body)(const Run *run); /* false: went where nothing is */
} Kernel;

static bool run_fill(const Run *run) {
    volatile uint64_t *dst = (void *)run->arguments[0];
    for (uint64_t i = 0; i < run->arguments[2]; i++) dst[i] = run->arguments[1];
    return true;
}

static bool run_spin(const Run *run) {
    uint64_t until = now_ns() + run->arguments[0];
    for (uint64_t now; !over(run->context) && (now = now_ns()) < until;)
        sleep_ns(until - now < 100000 ? until - now : 100000);
    return true;
}

static bool run_scribble(const Run *run) {
    volatile uint64_t *dst = (void *)run->arguments[0];
    uint64_t until = now_ns() + run->arguments[2], counter = 0;
    do {
        counter++;
        for (uint64_t i = 0; i < run->arguments[1]; i++) dst[i] = counter;
    } while (!over(run->context) && now_ns() < until);
    return true;
}

static bool run_wait_flag(const Run *run) {
    const uint64_t *flag = (void *)run->arguments[0]; /* cyclic, as a stream's wait */
    while (!over(run->context) && (int64_t)(__atomic_load_n(flag, __ATOMIC_ACQUIRE) - run->arguments[1]) < 0)
        sleep_ns(20000);
    return true;
}

static bool run_count(const Run *run) {
    volatile uint64_t *dst = (void *)run->arguments[0];
    for (uint64_t i = 0; i < run->arguments[1]; i++) dst[i] = run->arguments[2] + i;
    return true;
}

static bool run_copy(const Run *run) {
    memmove((void *)run->arguments[0], (void *)run->arguments[1], run->arguments[2] * 8);
    return true;
}

static bool run_gather(const Run *run) {
    const uint64_t *arguments = run->arguments, *to = (void *)arguments[2], *from = (void *)arguments[3];
    for (uint64_t i = 0; i < arguments[5]; i++) {
        uintptr_t dst = arguments[0] + to[i], src = arguments[1] + from[i];
        if (!inside(run->areas[0], dst, arguments[4]) || !inside(run->areas[1], src, arguments[4])) return false;
        memmove((void *)dst, (void *)src, arguments[4]);
    }
    return true;
}

static bool run_burn(const Run *run) { /* the sink is there only so that a compiler leaves nothing out */
    float sum = 1.0f;
    for (uint64_t i = 0; i < run->arguments[1] && !over(run->context); i++) sum = sum * 0.999f + 0.5f;
    if (sum == -1.0f) *(volatile float *)run->arguments[0] = sum;
    return true;
}

#define READS CU_MEM_ACCESS_FLAGS_PROT_READ
#define WRITES CU_MEM_ACCESS_FLAGS_PROT_READWRITE

static const Kernel kernels[] = {
    {"sgl_fill", 3, 1, {{0, 2, 8, WRITES}}, run_fill},                   /* (dst, value, words) */
    {"sgl_spin_ns", 1, 0, {{0, 0, 0, 0}}, run_spin},                     /* (ns) */
    {"sgl_scribble", 3, 1, {{0, 1, 8, WRITES}}, run_scribble},           /* (dst, words, ns) */
    {"sgl_wait_flag", 2, 1, {{0, ONE, 8, READS}}, run_wait_flag},        /* (flag, value) */
    {"sgl_count", 3, 1, {{0, 1, 8, WRITES}}, run_count},                 /* (dst, words, first) */
    {"sgl_copy", 3, 2, {{0, 2, 8, WRITES}, {1, 2, 8, READS}}, run_copy}, /* (dst, src, words) */
    {"sgl_gather", 6, 4, {{0, BASE, 1, WRITES}, {1, BASE, 1, READS}, {2, 5, 8, READS}, {3, 5, 8, READS}}, run_gather},
    /* (dst, src, dst_offsets, src_offsets, chunk_bytes, num_chunks) */
    {"sgl_burn", 2, 1, {{0, ONE, 4, WRITES}}, run_burn}, /* (sink, iterations) */
};

static const Kernel *kernel_of(const char *name) {
    for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++)
        if (!strcmp(kernels[i].name, name)) return &kernels[i];
    return NULL;
}

static void run_kernel(CUcontext context, const Kernel *kernel, const uint64_t *arguments) {
    Run run = {context, arguments, {NULL}};
    unsigned held = 0;
    CUresult code = CUDA_SUCCESS;
    for (; held < kernel->num_areas && !code; held++) {
        uintptr_t address = arguments[kernel->areas[held].pointer];
        int by = kernel->areas[held].count;
        uint64_t count = by >= 0 ? arguments[by] : 1;
        size_t unit = kernel->areas[held].unit;
        Range *range =
            count <= SIZE_MAX / unit ? reach(context, address, count * unit, kernel->areas[held].access) : NULL;
        if (!range)
            code = CUDA_ERROR_ILLEGAL_ADDRESS;
        else if (address % unit)
            code = CUDA_ERROR_MISALIGNED_ADDRESS;
        if (code) break;
        run.areas[held] = range;
        range->users++;
    }
    if (!code) {
        pthread_mutex_unlock(&lock);
        bool ok = kernel->body(&run);
        pthread_mutex_lock(&lock);
        if (!ok) code = CUDA_ERROR_ILLEGAL_ADDRESS;
    }
    while (held--) run.areas[held]->users--;
    if (code) fault(context, code);
}

/* ---- streams ---- */

static void marker_drop(Marker *marker) {
    if (marker && !--marker->refs) free(marker);
}

static Marker *marker_share(Marker *marker) {
    marker->refs++;
    return marker;
}

/* Between looks at what another process may change: the longer the more it has been looked at. */
static void rest(unsigned looks) {
    pthread_mutex_unlock(&lock);
    sleep_ns(looks < 500 ? 20000 : 200000);
    pthread_mutex_lock(&lock);
}

static bool is_told(const char *what) { /* a file of SOFTCUDA_DIR, for all or for this process */
    char path[640];
    snprintf(path, sizeof path, "%s/%s", folder, what);
    if (!access(path, F_OK)) return true;
    snprintf(path, sizeof path, "%s/%s.%ld", folder, what, (long)getpid());
    return !access(path, F_OK);
}

static void copy_bytes(uintptr_t dst, uintptr_t src, size_t num_bytes) {
    if (!slow_ns_per_mb) {
        memmove((void *)dst, (void *)src, num_bytes);
        return;
    }
    for (size_t done = 0, some; done < num_bytes; done += some) {
        some = num_bytes - done < CHUNK ? num_bytes - done : CHUNK;
        memmove((void *)(dst + done), (void *)(src + done), some);
        sleep_ns((uint64_t)((double)some / (1 << 20) * (double)slow_ns_per_mb));
    }
}

static void run_copies(CUcontext context, Operation *it) {
    size_t held = 0;
    bool ok = true;
    for (; held < it->num_copies; held++) {
        Copy *copy = &it->copies[held];
        ok = side_of(context, copy->dst, copy->num_bytes, WRITES, &copy->to) != NOWHERE &&
             side_of(context, copy->src, copy->num_bytes, READS, &copy->from) != NOWHERE;
        if (!ok) break;
        if (copy->to) copy->to->users++;
        if (copy->from) copy->from->users++;
    }
    if (ok) {
        pthread_mutex_unlock(&lock);
        while (is_told("hold-copies") && !over(context)) sleep_ns(200000);
        for (size_t i = 0; i < it->num_copies && !over(context); i++)
            copy_bytes(it->copies[i].dst, it->copies[i].src, it->copies[i].num_bytes);
        pthread_mutex_lock(&lock);
    }
    while (held--) {
        if (it->copies[held].to) it->copies[held].to->users--;
        if (it->copies[held].from) it->copies[held].from->users--;
    }
    if (!ok) fault(context, CUDA_ERROR_ILLEGAL_ADDRESS);
}

static bool is_met(uint64_t at, uint64_t value, unsigned width, unsigned flags) {
    bool wide = width == 8;
    switch (flags & 3) {
    case CU_STREAM_WAIT_VALUE_GEQ: /* cyclic: a word may wrap around */
        return wide ? (int64_t)(at - value) >= 0 : (int32_t)(uint32_t)(at - value) >= 0;
    case CU_STREAM_WAIT_VALUE_EQ:
        return at == value;
    case CU_STREAM_WAIT_VALUE_AND:
        return (at & value) != 0;
    default:
        return (wide ? ~(at | value) : (uint64_t)(uint32_t)~(at | value)) != 0;
    }
}

static uint64_t load(uintptr_t address, unsigned width) {
    if (width == 8) return __atomic_load_n((uint64_t *)address, __ATOMIC_ACQUIRE);
    return __atomic_load_n((uint32_t *)address, __ATOMIC_ACQUIRE);
}

static void store(uintptr_t address, uint64_t value, unsigned width) {
    if (width == 8)
        __atomic_store_n((uint64_t *)address, value, __ATOMIC_RELEASE);
    else
        __atomic_store_n((uint32_t *)address, (uint32_t)value, __ATOMIC_RELEASE);
}

/* Whether a generation of a shared event is over. With its recorder's death it is: its streams bring nothing any more,
   and nobody is to wait for ever. (On a card that is not defined.) */
static bool is_past(SharedEvent *shared, uint64_t generation, bool ask) {
    uint64_t slot = generation % GENERATIONS;
    if (__atomic_load_n(&shared->slots[slot].done, __ATOMIC_ACQUIRE) >= generation) return true;
    return ask && !is_alive(shared->slots[slot].recorder);
}

static void execute(CUstream stream, Operation *it) {
    CUcontext context = stream->context;
    Range *range;
    switch (it->kind) {
    case COPIES:
        run_copies(context, it);
        break;
    case SET: {
        if (side_of(context, it->address, it->count * it->width, WRITES, &range) == NOWHERE || !range) {
            fault(context, CUDA_ERROR_ILLEGAL_ADDRESS);
            break;
        }
        range->users++;
        pthread_mutex_unlock(&lock);
        for (size_t i = 0; it->width == 4 && i < it->count; i++) ((uint32_t *)it->address)[i] = (uint32_t)it->value;
        if (it->width == 1) memset((void *)it->address, (int)it->value, it->count);
        pthread_mutex_lock(&lock);
        range->users--;
        break;
    }
    case WRITE_VALUE:
        if (reach(context, it->address, it->width, WRITES))
            store(it->address, it->value, it->width);
        else
            fault(context, CUDA_ERROR_ILLEGAL_ADDRESS);
        break;
    case WAIT_VALUE:
        for (unsigned looks = 0; !over(context); rest(looks++)) {
            if (!reach(context, it->address, it->width, READS))
                fault(context, CUDA_ERROR_ILLEGAL_ADDRESS);
            else if (is_met(load(it->address, it->width), it->value, it->width, it->flags))
                break;
        }
        break;
    case RECORD:
        it->marker->at_ns = now_ns();
        it->marker->done = true;
        break;
    case WAIT:
        while (!it->marker->done && !it->marker->lost && !over(context)) pthread_cond_wait(&changed, &lock);
        break;
    case RECORD_SHARED:
        __atomic_store_n(&it->shared->slots[it->generation % GENERATIONS].done, it->generation, __ATOMIC_RELEASE);
        break;
    case WAIT_SHARED:
        for (unsigned looks = 0; !over(context); rest(looks++))
            if (is_past(it->shared, it->generation, looks % 64 == 63)) break;
        break;
    case KERNEL:
        run_kernel(context, it->kernel, it->arguments);
        break;
    case HOST_FUNCTION:
        pthread_mutex_unlock(&lock);
        in_host_function = true;
        it->function(it->data);
        in_host_function = false;
        pthread_mutex_lock(&lock);
        break;
    }
}

static void stream_free(CUstream stream) {
    CUstream *at = &stream->context->streams;
    while (*at != stream) at = &(*at)->next;
    *at = stream->next;
    pthread_cond_destroy(&stream->work);
    if (stream != &stream->context->legacy) free(stream);
}

static void *stream_main(void *argument) {
    CUstream stream = argument;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!stream->first && !stream->ended) pthread_cond_wait(&stream->work, &lock);
        Operation *it = stream->first;
        if (!it) break;
        if (!over(stream->context))
            execute(stream, it);
        else if (it->kind == RECORD)
            it->marker->lost = true; /* for streams of other contexts, which wait no longer */
        stream->first = it->next;
        if (!stream->first) stream->last = NULL;
        marker_drop(it->marker);
        free(it);
        pthread_cond_broadcast(&changed);
    }
    stream_free(stream);
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return NULL;
}

static void stream_start(CUstream stream) {
    pthread_attr_t attributes;
    pthread_t thread;
    sigset_t all, before;
    sigfillset(&all); /* a process's signals are for its own threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    if (pthread_create(&thread, &attributes, stream_main, stream)) abort();
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    stream->started = true;
}

static Operation *operation(OperationKind kind, size_t num_copies) {
    Operation *it = made(sizeof *it + num_copies * sizeof(Copy));
    it->kind = kind;
    it->num_copies = num_copies;
    return it;
}

static void append(CUstream stream, Operation *it) {
    it->ticket = ++tickets;
    if (stream->last)
        stream->last->next = it;
    else
        stream->first = it;
    stream->last = it;
    if (!stream->started) stream_start(stream);
    pthread_cond_signal(&stream->work);
}

static void join(CUstream waiting, CUstream other) { /* what will be in the one waits for what is in the other */
    if (!other->first) return;
    Operation *record = operation(RECORD, 0), *wait = operation(WAIT, 0);
    record->marker = made(sizeof(Marker));
    record->marker->refs = 1;
    wait->marker = marker_share(record->marker);
    append(other, record);
    append(waiting, wait);
}

/* In order with what is in the stream; and stream 0 with all those that were not made non-blocking. */
static void enqueue(CUstream stream, Operation *it) {
    CUcontext context = stream->context;
    CUstream legacy = &context->legacy;
    if (stream == legacy) {
        for (CUstream each = context->streams; each; each = each->next)
            if (each != legacy && !(each->flags & CU_STREAM_NON_BLOCKING)) join(legacy, each);
    } else if (!(stream->flags & CU_STREAM_NON_BLOCKING)) {
        join(stream, legacy);
    }
    append(stream, it);
}

static CUstream stream_of(CUstream stream) { /* NULL: there is none such */
    if (!stream || stream == CU_STREAM_LEGACY) return current ? &current->legacy : NULL;
    for (CUcontext context = contexts; context; context = context->next)
        for (CUstream each = context->streams; each; each = each->next)
            if (each == stream && each != &context->legacy && !each->ended) return each;
    return NULL;
}

/* Wait for all that is in a context's streams now, or in one of them. */
static CUresult drain(CUcontext context, CUstream one) {
    uint64_t last = tickets;
    for (bool busy = true; busy && !over(context);) {
        busy = false;
        for (CUstream each = context->streams; each; each = each->next)
            if ((!one || each == one) && each->first && each->first->ticket <= last) busy = true;
        if (busy) pthread_cond_wait(&changed, &lock);
    }
    return context->error;
}

/* ---- every call ---- */

/* ALWAYS: is about no context's work. DRIVER: needs no context, and fails where the thread's is broken. CONTEXT: needs
   it. */
typedef enum { ALWAYS, DRIVER, CONTEXT } Needs;

static CUresult planted(const char *name) { /* an error that a test asked for */
    char told[96], path[640];
    for (int i = 0; i < num_failing; i++)
        if (!strcmp(failing[i].name, name) && ++failing[i].calls >= failing[i].from) return failing[i].code;
    for (int scope = 0; scope < 2; scope++) {
        if (scope)
            snprintf(told, sizeof told, "fail-%s.%ld", name, (long)getpid());
        else
            snprintf(told, sizeof told, "fail-%s", name);
        snprintf(path, sizeof path, "%s/%s", folder, told);
        FILE *file = access(path, F_OK) ? NULL : fopen(path, "re");
        if (!file) continue;
        int code = CUDA_ERROR_UNKNOWN;
        bool ok = fscanf(file, "%d", &code) == 1;
        fclose(file);
        if (ok && !unlink(path)) return (CUresult)code; /* or another process had it */
    }
    return CUDA_SUCCESS;
}

/* With the lock held, if it returns success. */
static CUresult enter(const char *name, Needs needs) {
    if (stage != READY) return CUDA_ERROR_NOT_INITIALIZED;
    if (in_host_function) return CUDA_ERROR_NOT_PERMITTED;
    pthread_mutex_lock(&lock);
    CUresult code = CUDA_SUCCESS;
    if (needs == CONTEXT && !current)
        code = CUDA_ERROR_INVALID_CONTEXT;
    else if (needs == CONTEXT && current->destroyed)
        code = CUDA_ERROR_CONTEXT_IS_DESTROYED;
    else if (needs != ALWAYS && current && current->error)
        code = current->error;
    else
        code = planted(name);
    if (current && is_fatal(code)) fault(current, code);
    if (code) pthread_mutex_unlock(&lock);
    return code;
}

static CUresult leave(CUresult code) {
    pthread_mutex_unlock(&lock);
    return code;
}

#define ENTER(needs) \
    do { \
        CUresult entered = enter(__func__, needs); \
        if (entered) return entered; \
    } while (0)
#define LEAVE_IF(wrong, code) \
    do { \
        if (wrong) return leave(code); \
    } while (0)

/* ---- the driver, errors, devices ---- */

static void before_fork(void) {
    pthread_mutex_lock(&lock);
}
static void after_fork(void) {
    pthread_mutex_unlock(&lock);
}

/* A process that was forked has no CUDA, and nothing of its parent's. */
static void in_child(void) {
    stage = FORKED;
    close(account_fd);
    close(lease_fd);
    for (Handle *each = handles; each; each = each->next) close(each->memory->fd);
    for (Range *each = ranges; each; each = each->next)
        if (each->memory) close(each->memory->fd); /* some twice: nobody opens any meanwhile */
    pthread_mutex_unlock(&lock);
}

static void read_failing(const char *text) {
    char copy[512], *rest_of = NULL;
    set_text(copy, sizeof copy, text ? text : "");
    for (char *each = strtok_r(copy, ",", &rest_of); each; each = strtok_r(NULL, ",", &rest_of)) {
        Failing *it = &failing[num_failing];
        int code = 0;
        if (num_failing == 16 || sscanf(each, "%63[^:]:%lu:%d", it->name, &it->from, &code) != 3) {
            fprintf(stderr, "softcuda: SOFTCUDA_FAIL says %s, which is not NAME:N:CODE\n", each);
            abort();
        }
        it->code = (CUresult)code;
        num_failing++;
    }
}

static uint64_t number_from(const char *name, uint64_t otherwise) {
    const char *text = getenv(name);
    return text && *text ? strtoull(text, NULL, 0) : otherwise;
}

static void uuid_of(int number, char uuid[16]) {
    memcpy(uuid, "softcuda\0card\0\0\0", 16);
    uuid[14] = (char)(number >> 8);
    uuid[15] = (char)number;
}

/* One that CUDA_VISIBLE_DEVICES names: an ordinal, or GPU- and the beginning of a UUID. -1: none. */
static int card_named(const char *text, int count) {
    char *end;
    if (!strncmp(text, "GPU-", 4)) {
        for (int number = 0; number < count; number++) {
            char name[48], uuid[16];
            int at = snprintf(name, sizeof name, "GPU-");
            uuid_of(number, uuid);
            for (int i = 0; i < 16; i++) {
                bool dash = i == 4 || i == 6 || i == 8 || i == 10;
                at += snprintf(name + at, sizeof name - (size_t)at, dash ? "-%02x" : "%02x", (unsigned char)uuid[i]);
            }
            if (!strncasecmp(name, text, strlen(text))) return number;
        }
        return -1;
    }
    long number = strtol(text, &end, 10);
    return end != text && !*end && number >= 0 && number < count ? (int)number : -1;
}

static void find_devices(void) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    int count = (int)number_from("SOFTCUDA_DEVICES", 1);
    if (count > MAX_DEVICES) count = MAX_DEVICES;
    if (!visible) {
        for (; num_devices < count; num_devices++) devices[num_devices].number = num_devices;
        return;
    }
    char copy[512], *rest_of = NULL;
    set_text(copy, sizeof copy, visible);
    for (char *each = strtok_r(copy, ",", &rest_of); each; each = strtok_r(NULL, ",", &rest_of)) {
        int number = card_named(each + strspn(each, " "), count);
        if (number < 0) return;            /* those before it are there, as with NVIDIA's */
        if (device_of_card(number) >= 0) { /* one twice: none */
            num_devices = 0;
            return;
        }
        devices[num_devices++].number = number;
    }
}

static bool make_folders(void) {
    const char *said = getenv("SOFTCUDA_DIR"), *kinds[] = {"", "memory", "events", "processes"};
    char path[640];
    if (said && *said)
        set_text(folder, sizeof folder, said);
    else
        snprintf(folder, sizeof folder, "/tmp/softcuda-%ld", (long)getuid());
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        path_of(path, sizeof path, kinds[i], "");
        if (mkdir(path, 0700) && errno != EEXIST) return false;
    }
    path_of(path, sizeof path, ".", "account");
    account_fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (account_fd < 0) return false;
    account_enter();
    path_of(path, sizeof path, "processes", "");
    DIR *listing = opendir(path);
    for (struct dirent *each; listing && (each = readdir(listing));) is_held(dirfd(listing), each->d_name);
    if (listing) closedir(listing);
    process = random_word();
    numbered_path(path, sizeof path, "processes", process);
    lease_fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    bool ok = lease_fd >= 0 && !flock(lease_fd, LOCK_EX | LOCK_NB);
    account_leave();
    return ok;
}

CUresult cuInit(unsigned int flags) {
    if (stage == FORKED) return CUDA_ERROR_NOT_INITIALIZED;
    if (flags) return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    if (stage == READY) return leave(CUDA_SUCCESS);
    num_devices = num_failing = 0;
    find_devices();
    budget = number_from("SOFTCUDA_MEMORY", (uint64_t)256 << 20);
    slow_ns_per_mb = number_from("SOFTCUDA_SLOW_NS_PER_MB", 0);
    read_failing(getenv("SOFTCUDA_FAIL"));
    LEAVE_IF(!num_devices, CUDA_ERROR_NO_DEVICE);
    LEAVE_IF(!make_folders(), CUDA_ERROR_OPERATING_SYSTEM);
    CUresult code = planted(__func__);
    LEAVE_IF(code, code);
    pthread_atfork(before_fork, after_fork, in_child);
    stage = READY;
    return leave(CUDA_SUCCESS);
}

CUresult cuDriverGetVersion(int *version) {
    if (!version) return CUDA_ERROR_INVALID_VALUE;
    *version = DRIVER_VERSION;
    return CUDA_SUCCESS;
}

static const struct {
    CUresult code;
    const char *name, *text;
} errors[] = {
#define LISTED(name, number, text) {name, #name, text},
    ERRORS(LISTED)
#undef LISTED
};

CUresult cuGetErrorName(CUresult error, const char **name) {
    if (!name) return CUDA_ERROR_INVALID_VALUE;
    *name = NULL;
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == error) *name = errors[i].name;
    return *name ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    if (!text) return CUDA_ERROR_INVALID_VALUE;
    *text = NULL;
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == error) *text = errors[i].text;
    return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static bool is_device(CUdevice device) {
    return device >= 0 && device < num_devices;
}

CUresult cuDeviceGetCount(int *count) {
    ENTER(ALWAYS);
    LEAVE_IF(!count, CUDA_ERROR_INVALID_VALUE);
    *count = num_devices;
    return leave(CUDA_SUCCESS);
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    ENTER(ALWAYS);
    LEAVE_IF(!device, CUDA_ERROR_INVALID_VALUE);
    LEAVE_IF(!is_device(ordinal), CUDA_ERROR_INVALID_DEVICE);
    *device = ordinal;
    return leave(CUDA_SUCCESS);
}

CUresult cuDeviceGetName(char *name, int size, CUdevice device) {
    ENTER(ALWAYS);
    LEAVE_IF(!name || size <= 0, CUDA_ERROR_INVALID_VALUE);
    LEAVE_IF(!is_device(device), CUDA_ERROR_INVALID_DEVICE);
    snprintf(name, (size_t)size, "softcuda card %d", devices[device].number);
    return leave(CUDA_SUCCESS);
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    ENTER(ALWAYS);
    LEAVE_IF(!uuid, CUDA_ERROR_INVALID_VALUE);
    LEAVE_IF(!is_device(device), CUDA_ERROR_INVALID_DEVICE);
    uuid_of(devices[device].number, uuid->bytes);
    return leave(CUDA_SUCCESS);
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    ENTER(ALWAYS);
    LEAVE_IF(!bytes, CUDA_ERROR_INVALID_VALUE);
    LEAVE_IF(!is_device(device), CUDA_ERROR_INVALID_DEVICE);
    *bytes = budget;
    return leave(CUDA_SUCCESS);
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    static const struct {
        int attribute, value;
    } known[] = {
        {1, 1024},       /* threads of a block */
        {2, 1024},       /* along x */
        {3, 1024},       /* y */
        {4, 64},         /* z */
        {5, 2147483647}, /* blocks of a grid, along x */
        {6, 65535},      /* y */
        {7, 65535},      /* z */
        {8, 49152},      /* bytes of shared memory of a block */
        {10, 32},        /* threads of a warp */
        {13, 1000000},   /* kHz */
        {15, 1},         /* copies beside kernels */
        {16, 16},        /* multiprocessors */
        {19, 1},         /* host memory can be mapped */
        {31, 1},         /* kernels beside one another */
        {39, 2048},      /* threads of a multiprocessor */
        {40, 2},         /* copy engines */
        {41, 1},         /* unified addressing */
        {75, 9},         /* compute capability 9 */
        {76, 0},         /* .0 */
        {78, 1},         /* stream priorities */
        {91, 1},         /* registered memory by its host address */
        {99, 1},         /* it can be registered */
        {102, 1},        /* virtual memory management */
        {103, 1},        /* with file descriptors */
        {122, 1},        /* stream memory operations of 64 bits */
        {123, 1},        /* WAIT_VALUE_NOR */
        {125, 1},        /* IPC events */
    };
    ENTER(ALWAYS);
    LEAVE_IF(!value || (int)attribute < 1 || (int)attribute > 147, CUDA_ERROR_INVALID_VALUE);
    LEAVE_IF(!is_device(device), CUDA_ERROR_INVALID_DEVICE);
    *value = (int)attribute == 33 ? devices[device].number + 1 : 0; /* the bus */
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].attribute == (int)attribute) *value = known[i].value;
    return leave(CUDA_SUCCESS);
}

/* ---- contexts ---- */

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    ENTER(ALWAYS);
    LEAVE_IF(!context, CUDA_ERROR_INVALID_VALUE);
    LEAVE_IF(!is_device(device), CUDA_ERROR_INVALID_DEVICE);
    CUcontext it = devices[device].context;
    if (!it) {
        it = made(sizeof *it);
        it->device = device;
        it->error = devices[device].error;
        it->legacy.context = it;
        pthread_cond_init(&it->legacy.work, NULL);
        it->streams = &it->legacy;
        it->next = contexts;
        contexts = devices[device].context = it;
    }
    it->retained++;
    *context = it;
    return leave(CUDA_SUCCESS);
}

static void end_stream(CUstream stream) { /* once its work is done, or dropped */
    stream->ended = true;
    if (stream->started)
        pthread_cond_signal(&stream->work);
    else
        stream_free(stream);
}

static void event_free(CUevent event) {
    CUevent *at = &events;
    while (*at != event) at = &(*at)->next;
    *at = event->next;
    marker_drop(event->marker);
    if (event->shared && !event->opened) {
        char path[640];
        numbered_path(path, sizeof path, "events", event->number);
        unlink(path);
    }
    free(event); /* its shared state stays mapped: what is queued may wait for it */
}

static void module_free(CUmodule module) {
    CUmodule *at = &modules;
    while (*at != module) at = &(*at)->next;
    *at = module->next;
    for (CUfunction each = module->functions, next; each; each = next) {
        next = each->next;
        free(each);
    }
    free(module);
}

/* What is queued is dropped, and all that was the context's goes. The structure stays: to tell that it is of no use. */
static void destroy(CUcontext context) {
    __atomic_store_n(&context->destroyed, true, __ATOMIC_RELAXED);
    pthread_cond_broadcast(&changed);
    for (CUstream each = context->streams, next; each; each = next) {
        next = each->next;
        if (!each->ended) end_stream(each);
    }
    while (context->streams) pthread_cond_wait(&changed, &lock);
    for (CUevent each = events, next; each; each = next) {
        next = each->next;
        if (each->context == context) event_free(each);
    }
    for (CUmodule each = modules, next; each; each = next) {
        next = each->next;
        if (each->context == context) module_free(each);
    }
    for (Range *each = ranges; each;) {
        if (each->context != context || each->closing) {
            each = each->next;
            continue;
        }
        range_close(each);
        range_free(each);
        each = ranges; /* it let go of the lock */
    }
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    ENTER(ALWAYS);
    LEAVE_IF(!is_device(device), CUDA_ERROR_INVALID_DEVICE);
    CUcontext context = devices[device].context;
    LEAVE_IF(!context, CUDA_ERROR_INVALID_CONTEXT);
    if (!--context->retained) {
        devices[device].context = NULL;
        destroy(context);
    }
    return leave(CUDA_SUCCESS);
}

static bool is_context(CUcontext context) {
    CUcontext it = contexts;
    while (it && it != context) it = it->next;
    return it && !it->destroyed;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    ENTER(ALWAYS);
    LEAVE_IF(context && !is_context(context), CUDA_ERROR_INVALID_CONTEXT);
    current = context;
    if (!context && num_below) current = below[--num_below]; /* instead of the top; none: the top goes */
    return leave(CUDA_SUCCESS);
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
    ENTER(ALWAYS);
    LEAVE_IF(!is_context(context), CUDA_ERROR_INVALID_CONTEXT);
    LEAVE_IF(num_below == MAX_STACK, CUDA_ERROR_OUT_OF_MEMORY);
    if (current) below[num_below++] = current;
    current = context;
    return leave(CUDA_SUCCESS);
}

CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    ENTER(ALWAYS);
    LEAVE_IF(!current, CUDA_ERROR_INVALID_CONTEXT);
    if (context) *context = current;
    current = num_below ? below[--num_below] : NULL;
    return leave(CUDA_SUCCESS);
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    ENTER(ALWAYS);
    LEAVE_IF(!context, CUDA_ERROR_INVALID_VALUE);
    *context = current;
    return leave(CUDA_SUCCESS);
}

CUresult cuCtxGetDevice(CUdevice *device) {
    ENTER(CONTEXT);
    LEAVE_IF(!device, CUDA_ERROR_INVALID_VALUE);
    *device = current->device;
    return leave(CUDA_SUCCESS);
}

CUresult cuCtxSynchronize(void) {
    ENTER(CONTEXT);
    return leave(drain(current, NULL));
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    ENTER(CONTEXT);
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return leave(CUDA_SUCCESS);
}

/* ---- memory of a device ---- */

CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    ENTER(CONTEXT);
    LEAVE_IF(!free_bytes || !total, CUDA_ERROR_INVALID_VALUE);
    account_enter();
    size_t live = live_bytes(devices[current->device].number);
    account_leave();
    *free_bytes = live < budget ? budget - live : 0;
    *total = budget;
    return leave(CUDA_SUCCESS);
}

CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t num_bytes) {
    ENTER(CONTEXT);
    LEAVE_IF(!address || !num_bytes, CUDA_ERROR_INVALID_VALUE);
    Memory *memory;
    CUresult code = memory_new(current->device, num_bytes, &memory);
    LEAVE_IF(code, code);
    uintptr_t at = memory_map(memory);
    if (!at) memory_drop(memory);
    LEAVE_IF(!at, CUDA_ERROR_OUT_OF_MEMORY);
    *address = range_new(ALLOCATED, at, num_bytes, memory, current)->address;
    return leave(CUDA_SUCCESS);
}

static Range *range_at(uintptr_t address, RangeKind kind) { /* the one that begins there */
    Range *range = range_of(address);
    return range && range->address == address && range->kind == kind && !range->closing ? range : NULL;
}

CUresult cuMemFree_v2(CUdeviceptr address) {
    ENTER(CONTEXT);
    LEAVE_IF(!address, CUDA_SUCCESS);
    LEAVE_IF(!range_at(address, ALLOCATED), CUDA_ERROR_INVALID_VALUE);
    CUresult code = drain(current, NULL); /* as a card does */
    LEAVE_IF(code, code);
    Range *range = range_at(address, ALLOCATED);
    LEAVE_IF(!range, CUDA_ERROR_INVALID_VALUE);
    range_close(range);
    range_free(range);
    return leave(CUDA_SUCCESS);
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *num_bytes, CUdeviceptr address) {
    ENTER(CONTEXT);
    Range *range = range_of(address);
    LEAVE_IF(!range || !range->memory || range->closing, CUDA_ERROR_NOT_FOUND);
    if (base) *base = range->address;
    if (num_bytes) *num_bytes = range->num_bytes;
    return leave(CUDA_SUCCESS);
}

/* What an allocation is asked for with: pinned memory of a device. */
static CUresult check_properties(const CUmemAllocationProp *properties) {
    if (!properties || properties->type != CU_MEM_ALLOCATION_TYPE_PINNED) return CUDA_ERROR_INVALID_VALUE;
    if (properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE || properties->win32HandleMetaData)
        return CUDA_ERROR_INVALID_VALUE;
    if (properties->requestedHandleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
    return is_device(properties->location.id) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *properties,
                                       CUmemAllocationGranularity_flags option) {
    ENTER(DRIVER);
    CUresult code = check_properties(properties);
    LEAVE_IF(code, code);
    LEAVE_IF(!granularity || (unsigned)option > 1, CUDA_ERROR_INVALID_VALUE);
    *granularity = GRANULARITY;
    return leave(CUDA_SUCCESS);
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t num_bytes, const CUmemAllocationProp *properties,
                     unsigned long long flags) {
    ENTER(DRIVER);
    CUresult code = check_properties(properties);
    LEAVE_IF(code, code);
    LEAVE_IF(!handle || flags || !num_bytes || num_bytes % GRANULARITY, CUDA_ERROR_INVALID_VALUE);
    Memory *memory;
    code = memory_new(properties->location.id, num_bytes, &memory);
    LEAVE_IF(code, code);
    memory->exportable = properties->requestedHandleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    *handle = handle_new(memory)->number;
    return leave(CUDA_SUCCESS);
}

CUresult cuMemRelease(CUmemGenericAllocationHandle number) {
    ENTER(DRIVER);
    Handle **at = handle_at(number), *handle = *at;
    LEAVE_IF(!handle, CUDA_ERROR_INVALID_VALUE);
    *at = handle->next;
    memory_drop(handle->memory);
    free(handle);
    return leave(CUDA_SUCCESS);
}

CUresult cuMemExportToShareableHandle(void *result, CUmemGenericAllocationHandle number, CUmemAllocationHandleType type,
                                      unsigned long long flags) {
    ENTER(DRIVER);
    Handle *handle = *handle_at(number);
    LEAVE_IF(!result || !handle || flags || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CUDA_ERROR_INVALID_VALUE);
    LEAVE_IF(!handle->memory->exportable, CUDA_ERROR_INVALID_VALUE);
    int fd = fcntl(handle->memory->fd, F_DUPFD_CLOEXEC, 0);
    LEAVE_IF(fd < 0, CUDA_ERROR_OPERATING_SYSTEM);
    *(int *)result = fd;
    return leave(CUDA_SUCCESS);
}

/* The name of the allocation that a descriptor is. */
static bool name_of(int fd, char *name, size_t size) {
    struct stat it, other;
    char path[640];
    bool found = false;
    path_of(path, sizeof path, "memory", "");
    if (fstat(fd, &it) || !S_ISREG(it.st_mode)) return false;
    DIR *listing = opendir(path);
    for (struct dirent *each; listing && !found && (each = readdir(listing));) {
        if (card_of(each->d_name) < 0 || fstatat(dirfd(listing), each->d_name, &other, 0)) continue;
        found = other.st_ino == it.st_ino && other.st_dev == it.st_dev;
        if (found) set_text(name, size, each->d_name);
    }
    if (listing) closedir(listing);
    return found;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shared,
                                        CUmemAllocationHandleType type) {
    ENTER(DRIVER);
    char name[40];
    int fd = (int)(intptr_t)shared;
    struct stat about;
    LEAVE_IF(!handle || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || fd < 0, CUDA_ERROR_INVALID_VALUE);
    LEAVE_IF(!name_of(fd, name, sizeof name), CUDA_ERROR_INVALID_VALUE);
    int device = device_of_card(card_of(name));
    LEAVE_IF(device < 0, CUDA_ERROR_INVALID_DEVICE);
    int own = fcntl(fd, F_DUPFD_CLOEXEC, 0); /* the caller's stays the caller's */
    LEAVE_IF(own < 0 || fstat(own, &about), CUDA_ERROR_OPERATING_SYSTEM);
    Memory *memory = made(sizeof *memory);
    memory->fd = own;
    memory->num_bytes = (size_t)about.st_size;
    memory->device = device;
    memory->exportable = true;
    memory->refs = 1;
    set_text(memory->name, sizeof memory->name, name);
    *handle = handle_new(memory)->number;
    return leave(CUDA_SUCCESS);
}

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t num_bytes, size_t alignment, CUdeviceptr hint,
                             unsigned long long flags) {
    ENTER(DRIVER);
    LEAVE_IF(!address || flags || !num_bytes || num_bytes % GRANULARITY, CUDA_ERROR_INVALID_VALUE);
    LEAVE_IF(alignment & (alignment - 1) || hint % PAGE, CUDA_ERROR_INVALID_VALUE);
    if (alignment < GRANULARITY) alignment = GRANULARITY;
    char *base = mmap((void *)(uintptr_t)hint, num_bytes + alignment, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    LEAVE_IF(base == MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
    uintptr_t at = ((uintptr_t)base + alignment - 1) / alignment * alignment;
    if (at > (uintptr_t)base) munmap(base, at - (uintptr_t)base);
    if (at < (uintptr_t)base + alignment) munmap((char *)at + num_bytes, (uintptr_t)base + alignment - at);
    Reservation *reservation = made(sizeof *reservation);
    reservation->address = at;
    reservation->num_bytes = num_bytes;
    reservation->next = reservations;
    reservations = reservation;
    *address = at;
    return leave(CUDA_SUCCESS);
}

static bool is_mapped(uintptr_t address, size_t num_bytes) {
    for (Range *each = ranges; each; each = each->next)
        if (each->kind == MAPPED && overlap(address, num_bytes, each->address, each->num_bytes)) return true;
    return false;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t num_bytes) {
    ENTER(DRIVER);
    Reservation **at = &reservations, *it;
    while (*at && (*at)->address != address) at = &(*at)->next;
    it = *at;
    LEAVE_IF(!it || it->num_bytes != num_bytes || is_mapped(address, num_bytes), CUDA_ERROR_INVALID_VALUE);
    munmap((void *)it->address, num_bytes);
    *at = it->next;
    free(it);
    return leave(CUDA_SUCCESS);
}

CUresult cuMemMap(CUdeviceptr address, size_t num_bytes, size_t offset, CUmemGenericAllocationHandle number,
                  unsigned long long flags) {
    ENTER(DRIVER);
    Handle *handle = *handle_at(number);
    Reservation *it = reservations;
    while (it && !(address >= it->address && address + num_bytes <= it->address + it->num_bytes)) it = it->next;
    LEAVE_IF(!handle || !it || offset || flags || !num_bytes, CUDA_ERROR_INVALID_VALUE);
    LEAVE_IF(address % GRANULARITY || num_bytes % GRANULARITY || num_bytes > handle->memory->num_bytes,
             CUDA_ERROR_INVALID_VALUE);
    LEAVE_IF(is_mapped(address, num_bytes), CUDA_ERROR_INVALID_VALUE);
    void *at = mmap((void *)(uintptr_t)address, num_bytes, PROT_NONE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE,
                    handle->memory->fd, 0);
    LEAVE_IF(at == MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
    madvise(at, num_bytes, MADV_DONTFORK);
    handle->memory->refs++;
    range_new(MAPPED, address, num_bytes, handle->memory, NULL);
    return leave(CUDA_SUCCESS);
}

CUresult cuMemUnmap(CUdeviceptr address, size_t num_bytes) {
    ENTER(DRIVER);
    Range *range = range_at(address, MAPPED);
    LEAVE_IF(!range || range->num_bytes != num_bytes, CUDA_ERROR_INVALID_VALUE);
    range_close(range);
    void *at = mmap((void *)(uintptr_t)address, num_bytes, PROT_NONE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) abort();
    range_free(range);
    return leave(CUDA_SUCCESS);
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t num_bytes, const CUmemAccessDesc *wanted, size_t count) {
    ENTER(DRIVER);
    LEAVE_IF(!wanted || !count || !num_bytes || num_bytes % GRANULARITY, CUDA_ERROR_INVALID_VALUE);
    for (size_t i = 0; i < count; i++) {
        int flags = (int)wanted[i].flags;
        LEAVE_IF(wanted[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE || flags < 0 || flags == 2 || flags > 3,
                 CUDA_ERROR_INVALID_VALUE);
        LEAVE_IF(!is_device(wanted[i].location.id), CUDA_ERROR_INVALID_DEVICE);
    }
    Range *range;
    for (uintptr_t at = address; at < address + num_bytes; at += range->num_bytes) { /* whole mappings, without a gap */
        range = range_at(at, MAPPED);
        LEAVE_IF(!range || range->num_bytes > address + num_bytes - at, CUDA_ERROR_INVALID_VALUE);
    }
    for (uintptr_t at = address; at < address + num_bytes; at += range->num_bytes) {
        int any = 0, means = PROT_NONE;
        range = range_at(at, MAPPED);
        for (size_t i = 0; i < count; i++) range->access[wanted[i].location.id] = (int)wanted[i].flags;
        for (int i = 0; i < num_devices; i++) any |= range->access[i];
        if (any & CU_MEM_ACCESS_FLAGS_PROT_READ) means = PROT_READ;
        if (any == CU_MEM_ACCESS_FLAGS_PROT_READWRITE) means = PROT_READ | PROT_WRITE;
        if (mprotect((void *)at, range->num_bytes, means)) abort();
    }
    return leave(CUDA_SUCCESS);
}

/* ---- memory of the host ---- */

CUresult cuMemHostRegister_v2(void *pointer, size_t num_bytes, unsigned int flags) {
    ENTER(CONTEXT);
    uintptr_t address = (uintptr_t)pointer;
    LEAVE_IF(!pointer || !num_bytes || flags & ~15u, CUDA_ERROR_INVALID_VALUE);
    LEAVE_IF(flags & ~(unsigned)(CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP), CUDA_ERROR_NOT_SUPPORTED);
    LEAVE_IF(is_known(address, num_bytes), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    LEAVE_IF(!is_process_memory(address, num_bytes), CUDA_ERROR_INVALID_VALUE);
    range_new(REGISTERED, address, num_bytes, NULL, current)->flags = flags;
    return leave(CUDA_SUCCESS);
}

CUresult cuMemHostUnregister(void *pointer) {
    ENTER(CONTEXT);
    Range *range = range_at((uintptr_t)pointer, REGISTERED);
    LEAVE_IF(!range, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    range_close(range);
    range_free(range);
    return leave(CUDA_SUCCESS);
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *address, void *pointer, unsigned int flags) {
    ENTER(CONTEXT);
    Range *range = range_of((uintptr_t)pointer);
    LEAVE_IF(!address || flags || !range || (range->kind != REGISTERED && range->kind != HOST),
             CUDA_ERROR_INVALID_VALUE);
    LEAVE_IF(!reach(current, (uintptr_t)pointer, 1, READS), CUDA_ERROR_INVALID_VALUE);
    *address = (uintptr_t)pointer;
    return leave(CUDA_SUCCESS);
}

CUresult cuMemHostAlloc(void **pointer, size_t num_bytes, unsigned int flags) {
    ENTER(CONTEXT);
    LEAVE_IF(!pointer || !num_bytes || flags & ~7u, CUDA_ERROR_INVALID_VALUE);
    size_t whole = (num_bytes + PAGE - 1) / PAGE * PAGE;
    void *at = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    LEAVE_IF(at == MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
    range_new(HOST, (uintptr_t)at, num_bytes, NULL, current);
    *pointer = at;
    return leave(CUDA_SUCCESS);
}

CUresult cuMemFreeHost(void *pointer) {
    ENTER(CONTEXT);
    LEAVE_IF(!range_at((uintptr_t)pointer, HOST), CUDA_ERROR_INVALID_VALUE);
    CUresult code = drain(current, NULL);
    LEAVE_IF(code, code);
    Range *range = range_at((uintptr_t)pointer, HOST);
    LEAVE_IF(!range, CUDA_ERROR_INVALID_VALUE);
    range_close(range);
    range_free(range);
    return leave(CUDA_SUCCESS);
}

/* ---- copies ---- */

typedef enum { ANY_WAY, TO_DEVICE, TO_HOST, IN_DEVICE } Way;

/* Both sides must be somewhere, and where the call's name says "device", known to CUDA. Pageable: some side is. */
static bool check_copy(const Copy *copy, Way way, bool *pageable) {
    Range *range;
    Side to = side_of(current, copy->dst, copy->num_bytes, WRITES, &range);
    Side from = side_of(current, copy->src, copy->num_bytes, READS, &range);
    if (to == NOWHERE || from == NOWHERE) return false;
    if ((way == TO_DEVICE || way == IN_DEVICE) && to == PAGEABLE_SIDE) return false;
    if ((way == TO_HOST || way == IN_DEVICE) && from == PAGEABLE_SIDE) return false;
    if (to == PAGEABLE_SIDE || from == PAGEABLE_SIDE) *pageable = true;
    return true;
}

/* In stream order. A copy of pageable memory is over when the call returns, as it may be on a card: who relies on it
   that such a call comes back at once is wrong. */
static CUresult copy(uintptr_t dst, uintptr_t src, size_t num_bytes, CUstream stream, Way way, bool wait) {
    stream = stream_of(stream);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (!num_bytes) return CUDA_SUCCESS;
    Operation *it = operation(COPIES, 1);
    it->copies[0] = (Copy){dst, src, num_bytes, NULL, NULL};
    if (!check_copy(&it->copies[0], way, &wait)) {
        free(it);
        return CUDA_ERROR_INVALID_VALUE;
    }
    enqueue(stream, it);
    return wait ? drain(stream->context, stream) : CUDA_SUCCESS;
}

CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t num_bytes, CUstream stream) {
    ENTER(CONTEXT);
    return leave(copy(dst, src, num_bytes, stream, ANY_WAY, false));
}

CUresult cuMemcpy(CUdeviceptr dst, CUdeviceptr src, size_t num_bytes) {
    ENTER(CONTEXT);
    return leave(copy(dst, src, num_bytes, NULL, ANY_WAY, true));
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr dst, const void *src, size_t num_bytes) {
    ENTER(CONTEXT);
    return leave(copy(dst, (uintptr_t)src, num_bytes, NULL, TO_DEVICE, true));
}

CUresult cuMemcpyDtoH_v2(void *dst, CUdeviceptr src, size_t num_bytes) {
    ENTER(CONTEXT);
    return leave(copy((uintptr_t)dst, src, num_bytes, NULL, TO_HOST, true));
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr dst, const void *src, size_t num_bytes, CUstream stream) {
    ENTER(CONTEXT);
    return leave(copy(dst, (uintptr_t)src, num_bytes, stream, TO_DEVICE, false));
}

CUresult cuMemcpyDtoHAsync_v2(void *dst, CUdeviceptr src, size_t num_bytes, CUstream stream) {
    ENTER(CONTEXT);
    return leave(copy((uintptr_t)dst, src, num_bytes, stream, TO_HOST, false));
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr dst, CUdeviceptr src, size_t num_bytes, CUstream stream) {
    ENTER(CONTEXT);
    return leave(copy(dst, src, num_bytes, stream, IN_DEVICE, false));
}

/* `failed` is the copy that is at fault, if it is one alone. */
static CUresult batch(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count, CUmemcpyAttributes *attributes,
                      size_t *firsts, size_t num_attributes, CUstream stream, size_t *failed) {
    if (!stream || stream == CU_STREAM_LEGACY) return CUDA_ERROR_INVALID_VALUE;
    stream = stream_of(stream);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (!dsts || !srcs || !sizes || !count || !attributes || !firsts) return CUDA_ERROR_INVALID_VALUE;
    if (!num_attributes || num_attributes > count || firsts[0]) return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < num_attributes; i++) {
        int order = (int)attributes[i].srcAccessOrder;
        if (order < CU_MEMCPY_SRC_ACCESS_ORDER_STREAM || order > CU_MEMCPY_SRC_ACCESS_ORDER_ANY)
            return CUDA_ERROR_INVALID_VALUE;
        if (attributes[i].flags > 1 || firsts[i] >= count || (i && firsts[i] <= firsts[i - 1]))
            return CUDA_ERROR_INVALID_VALUE;
    }
    Operation *it = operation(COPIES, count);
    bool wait = false;
    for (size_t i = 0; i < count; i++) {
        it->copies[i] = (Copy){dsts[i], srcs[i], sizes[i], NULL, NULL};
        if (sizes[i] && check_copy(&it->copies[i], ANY_WAY, &wait)) continue;
        free(it);
        *failed = i;
        return CUDA_ERROR_INVALID_VALUE;
    }
    enqueue(stream, it);
    return wait ? drain(stream->context, stream) : CUDA_SUCCESS;
}

CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
                               CUmemcpyAttributes *attributes, size_t *firsts, size_t num_attributes, CUstream stream) {
    ENTER(CONTEXT);
    size_t failed;
    return leave(batch(dsts, srcs, sizes, count, attributes, firsts, num_attributes, stream, &failed));
}

/* CUDA 12.8's. */
CUresult cuMemcpyBatchAsync(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
                            CUmemcpyAttributes *attributes, size_t *firsts, size_t num_attributes, size_t *failed,
                            CUstream stream);
CUresult cuMemcpyBatchAsync(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
                            CUmemcpyAttributes *attributes, size_t *firsts, size_t num_attributes, size_t *failed,
                            CUstream stream) {
    ENTER(CONTEXT);
    LEAVE_IF(!failed, CUDA_ERROR_INVALID_VALUE);
    *failed = SIZE_MAX;
    return leave(batch(dsts, srcs, sizes, count, attributes, firsts, num_attributes, stream, failed));
}

static CUresult set(uintptr_t address, uint64_t value, unsigned width, size_t count, CUstream stream) {
    Range *range;
    stream = stream_of(stream);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (!count) return CUDA_SUCCESS;
    if (address % width || count > SIZE_MAX / width) return CUDA_ERROR_INVALID_VALUE;
    if (side_of(current, address, count * width, WRITES, &range) == NOWHERE || !range) return CUDA_ERROR_INVALID_VALUE;
    Operation *it = operation(SET, 0);
    it->address = address;
    it->value = value;
    it->width = width;
    it->count = count;
    enqueue(stream, it);
    return CUDA_SUCCESS;
}

CUresult cuMemsetD8_v2(CUdeviceptr address, unsigned char value, size_t count) {
    ENTER(CONTEXT);
    return leave(set(address, value, 1, count, NULL));
}

CUresult cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t count, CUstream stream) {
    ENTER(CONTEXT);
    return leave(set(address, value, 1, count, stream));
}

CUresult cuMemsetD32Async(CUdeviceptr address, unsigned int value, size_t count, CUstream stream) {
    ENTER(CONTEXT);
    return leave(set(address, value, 4, count, stream));
}

/* ---- streams ---- */

static CUresult stream_new(CUstream *result, unsigned int flags) {
    if (!result || flags & ~(unsigned)CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
    CUstream stream = made(sizeof *stream);
    stream->context = current;
    stream->flags = flags;
    pthread_cond_init(&stream->work, NULL);
    stream->next = current->streams;
    *result = current->streams = stream;
    return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream *stream, unsigned int flags) {
    ENTER(CONTEXT);
    return leave(stream_new(stream, flags));
}

CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority) {
    ENTER(CONTEXT);
    (void)priority; /* a hint, clamped; work here has none */
    return leave(stream_new(stream, flags));
}

CUresult cuStreamDestroy_v2(CUstream stream) {
    ENTER(CONTEXT);
    CUstream it = stream_of(stream);
    LEAVE_IF(!it || it == &it->context->legacy, CUDA_ERROR_INVALID_HANDLE);
    end_stream(it);
    return leave(CUDA_SUCCESS);
}

CUresult cuStreamSynchronize(CUstream stream) {
    ENTER(CONTEXT);
    stream = stream_of(stream);
    LEAVE_IF(!stream, CUDA_ERROR_INVALID_HANDLE);
    return leave(drain(stream->context, stream));
}

CUresult cuStreamQuery(CUstream stream) {
    ENTER(CONTEXT);
    stream = stream_of(stream);
    LEAVE_IF(!stream, CUDA_ERROR_INVALID_HANDLE);
    return leave(stream->first ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS);
}

static CUresult value_operation(OperationKind kind, CUstream stream, uintptr_t address, uint64_t value, unsigned width,
                                unsigned flags) {
    stream = stream_of(stream);
    unsigned known = kind == WAIT_VALUE ? 3 : CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER;
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (kind == WAIT_VALUE && flags & CU_STREAM_WAIT_VALUE_FLUSH) return CUDA_ERROR_NOT_SUPPORTED; /* attribute 98 */
    if (flags & ~known || address % width) return CUDA_ERROR_INVALID_VALUE;
    if (!reach(stream->context, address, width, kind == WAIT_VALUE ? READS : WRITES)) return CUDA_ERROR_INVALID_VALUE;
    Operation *it = operation(kind, 0);
    it->address = address;
    it->value = value;
    it->width = width;
    it->flags = flags;
    enqueue(stream, it);
    return CUDA_SUCCESS;
}

CUresult cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned int flags) {
    ENTER(CONTEXT);
    return leave(value_operation(WRITE_VALUE, stream, address, value, 8, flags));
}

CUresult cuStreamWaitValue64_v2(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned int flags) {
    ENTER(CONTEXT);
    return leave(value_operation(WAIT_VALUE, stream, address, value, 8, flags));
}

CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned int flags) {
    ENTER(CONTEXT);
    return leave(value_operation(WRITE_VALUE, stream, address, value, 4, flags));
}

CUresult cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned int flags) {
    ENTER(CONTEXT);
    return leave(value_operation(WAIT_VALUE, stream, address, value, 4, flags));
}

/* ---- events ---- */

static CUevent event_of(CUevent event) {
    CUevent it = events;
    while (it && it != event) it = it->next;
    return it;
}

static CUevent event_new(unsigned flags) {
    CUevent event = made(sizeof *event);
    event->context = current;
    event->flags = flags;
    event->next = events;
    return events = event;
}

static SharedEvent *shared_map(uint64_t number, bool create) {
    char path[640];
    numbered_path(path, sizeof path, "events", number);
    int fd = open(path, O_RDWR | O_CLOEXEC | (create ? O_CREAT | O_EXCL : 0), 0600);
    if (fd < 0) return NULL;
    void *at = MAP_FAILED;
    if (!create || !ftruncate(fd, sizeof(SharedEvent)))
        at = mmap(NULL, sizeof(SharedEvent), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    return at == MAP_FAILED ? NULL : at;
}

CUresult cuEventCreate(CUevent *result, unsigned int flags) {
    ENTER(CONTEXT);
    LEAVE_IF(!result || flags & ~7u, CUDA_ERROR_INVALID_VALUE);
    LEAVE_IF(flags & CU_EVENT_INTERPROCESS && !(flags & CU_EVENT_DISABLE_TIMING), CUDA_ERROR_INVALID_VALUE);
    uint64_t number = random_word();
    SharedEvent *shared = flags & CU_EVENT_INTERPROCESS ? shared_map(number, true) : NULL;
    LEAVE_IF(flags & CU_EVENT_INTERPROCESS && !shared, CUDA_ERROR_OPERATING_SYSTEM);
    CUevent event = event_new(flags);
    event->number = number;
    event->shared = shared;
    *result = event;
    return leave(CUDA_SUCCESS);
}

CUresult cuEventDestroy_v2(CUevent event) {
    ENTER(CONTEXT);
    LEAVE_IF(!event_of(event), CUDA_ERROR_INVALID_HANDLE);
    event_free(event);
    return leave(CUDA_SUCCESS);
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
    ENTER(CONTEXT);
    event = event_of(event);
    stream = stream_of(stream);
    LEAVE_IF(!event || !stream || event->context != stream->context, CUDA_ERROR_INVALID_HANDLE);
    Operation *it = operation(event->shared ? RECORD_SHARED : RECORD, 0);
    if (event->shared) {
        it->shared = event->shared;
        account_enter();
        it->generation = ++event->shared->recorded;
        event->shared->slots[it->generation % GENERATIONS].recorder = process;
        account_leave();
    } else {
        marker_drop(event->marker);
        event->marker = made(sizeof(Marker));
        event->marker->refs = 1;
        it->marker = marker_share(event->marker);
    }
    enqueue(stream, it);
    return leave(CUDA_SUCCESS);
}

static uint64_t generation_of(SharedEvent *shared) {
    account_enter();
    uint64_t generation = shared->recorded;
    account_leave();
    return generation;
}

/* What an event stands for now: what was recorded last. Never recorded: nothing, which is over. */
static bool is_over(CUevent event) {
    if (!event->shared) return !event->marker || event->marker->done;
    uint64_t generation = generation_of(event->shared);
    return !generation || is_past(event->shared, generation, true);
}

CUresult cuEventQuery(CUevent event) {
    ENTER(CONTEXT);
    LEAVE_IF(!event_of(event), CUDA_ERROR_INVALID_HANDLE);
    return leave(is_over(event) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY);
}

CUresult cuEventSynchronize(CUevent event) {
    ENTER(CONTEXT);
    LEAVE_IF(!event_of(event), CUDA_ERROR_INVALID_HANDLE);
    CUcontext context = event->context;
    if (event->shared) {
        SharedEvent *shared = event->shared;
        uint64_t generation = generation_of(shared);
        for (unsigned looks = 0; generation && !over(context); rest(looks++))
            if (is_past(shared, generation, looks % 64 == 63)) break;
    } else if (event->marker) {
        Marker *marker = marker_share(event->marker);
        while (!marker->done && !over(context)) pthread_cond_wait(&changed, &lock);
        marker_drop(marker);
    }
    return leave(context->error);
}

static CUresult elapsed(float *milliseconds, CUevent start, CUevent end) {
    if (!milliseconds) return CUDA_ERROR_INVALID_VALUE;
    if (!event_of(start) || !event_of(end)) return CUDA_ERROR_INVALID_HANDLE;
    if ((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING || !start->marker || !end->marker)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!start->marker->done || !end->marker->done) return CUDA_ERROR_NOT_READY;
    *milliseconds = (float)((double)(int64_t)(end->marker->at_ns - start->marker->at_ns) / 1e6);
    return CUDA_SUCCESS;
}

CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end);
CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end) {
    ENTER(CONTEXT);
    return leave(elapsed(milliseconds, start, end));
}

CUresult cuEventElapsedTime_v2(float *milliseconds, CUevent start, CUevent end) {
    ENTER(CONTEXT);
    return leave(elapsed(milliseconds, start, end));
}

/* As of this call: a record that comes later is none of this wait's, and one that never came is no wait at all. */
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags) {
    ENTER(CONTEXT);
    stream = stream_of(stream);
    LEAVE_IF(!stream || !event_of(event), CUDA_ERROR_INVALID_HANDLE);
    LEAVE_IF(flags & ~1u, CUDA_ERROR_INVALID_VALUE);
    Operation *it = operation(event->shared ? WAIT_SHARED : WAIT, 0);
    if (event->shared) {
        it->shared = event->shared;
        it->generation = generation_of(event->shared);
    } else if (event->marker) {
        it->marker = marker_share(event->marker);
    }
    if (it->generation || it->marker)
        enqueue(stream, it);
    else
        free(it);
    return leave(CUDA_SUCCESS);
}

/* ---- between processes ---- */

typedef struct { /* the 64 bytes */
    char magic[8];
    uint64_t exporter;
    char name[48];
} Shared;
_Static_assert(sizeof(Shared) == 64, "a handle");

static Shared shared_as(const char *magic, const char *name) {
    Shared it = {{0}, process, {0}};
    memcpy(it.magic, magic, 8);
    set_text(it.name, sizeof it.name, name);
    return it;
}

CUresult cuIpcGetEventHandle(CUipcEventHandle *handle, CUevent event) {
    ENTER(CONTEXT);
    LEAVE_IF(!handle, CUDA_ERROR_INVALID_VALUE);
    LEAVE_IF(!event_of(event) || !event->shared || event->opened, CUDA_ERROR_INVALID_HANDLE);
    char name[32];
    snprintf(name, sizeof name, "%016llx", (unsigned long long)event->number);
    Shared it = shared_as("SCEVENT", name);
    memcpy(handle, &it, sizeof it);
    return leave(CUDA_SUCCESS);
}

CUresult cuIpcOpenEventHandle(CUevent *result, CUipcEventHandle handle) {
    ENTER(CONTEXT);
    Shared it;
    unsigned long long number;
    memcpy(&it, &handle, sizeof it);
    LEAVE_IF(!result || memcmp(it.magic, "SCEVENT", 8) || it.name[sizeof it.name - 1], CUDA_ERROR_INVALID_VALUE);
    LEAVE_IF(it.exporter == process, CUDA_ERROR_INVALID_CONTEXT);
    LEAVE_IF(sscanf(it.name, "%16llx", &number) != 1, CUDA_ERROR_INVALID_VALUE);
    SharedEvent *shared = shared_map(number, false);
    LEAVE_IF(!shared, CUDA_ERROR_MAP_FAILED);
    CUevent event = event_new(CU_EVENT_DISABLE_TIMING);
    event->number = number;
    event->shared = shared;
    event->opened = true;
    *result = event;
    return leave(CUDA_SUCCESS);
}

/* Only what cuMemAlloc returned, at its beginning. */
CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address) {
    ENTER(CONTEXT);
    Range *range = range_at(address, ALLOCATED);
    LEAVE_IF(!handle || !range, CUDA_ERROR_INVALID_VALUE);
    Shared it = shared_as("SCMEMORY", range->memory->name);
    memcpy(handle, &it, sizeof it);
    return leave(CUDA_SUCCESS);
}

static Range *opened_as(const char *name) {
    for (Range *each = ranges; each; each = each->next)
        if (each->kind == OPENED && each->context == current && !each->closing && !strcmp(each->memory->name, name))
            return each;
    return NULL;
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags) {
    ENTER(CONTEXT);
    Shared it;
    char path[640];
    struct stat about;
    memcpy(&it, &handle, sizeof it);
    LEAVE_IF(!address || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, CUDA_ERROR_INVALID_VALUE);
    LEAVE_IF(memcmp(it.magic, "SCMEMORY", 8) || it.name[sizeof it.name - 1] || strchr(it.name, '/'),
             CUDA_ERROR_INVALID_VALUE);
    LEAVE_IF(it.exporter == process, CUDA_ERROR_INVALID_CONTEXT);
    Range *range = opened_as(it.name);
    if (range) {
        range->opened++;
        *address = range->address;
        return leave(CUDA_SUCCESS);
    }
    int device = device_of_card(card_of(it.name));
    LEAVE_IF(device < 0, CUDA_ERROR_INVALID_DEVICE);
    path_of(path, sizeof path, "memory", "");
    account_enter(); /* so that it isn't swept meanwhile */
    int at = open(path, O_DIRECTORY | O_RDONLY | O_CLOEXEC), fd = -1;
    if (at >= 0 && is_held(at, it.name)) fd = openat(at, it.name, O_RDWR | O_CLOEXEC);
    bool ok = fd >= 0 && !flock(fd, LOCK_SH | LOCK_NB) && !fstat(fd, &about);
    if (at >= 0) close(at);
    account_leave();
    if (!ok && fd >= 0) close(fd);
    LEAVE_IF(!ok, CUDA_ERROR_INVALID_VALUE);
    Memory *memory = made(sizeof *memory);
    memory->fd = fd;
    memory->num_bytes = (size_t)about.st_size;
    memory->device = device;
    memory->refs = 1;
    set_text(memory->name, sizeof memory->name, it.name);
    uintptr_t mapped = memory_map(memory);
    if (!mapped) memory_drop(memory);
    LEAVE_IF(!mapped, CUDA_ERROR_MAP_FAILED);
    range = range_new(OPENED, mapped, memory->num_bytes, memory, current);
    range->opened = 1;
    *address = mapped;
    return leave(CUDA_SUCCESS);
}

CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    ENTER(CONTEXT);
    Range *range = range_at(address, OPENED);
    LEAVE_IF(!range, CUDA_ERROR_INVALID_VALUE);
    if (!--range->opened) {
        range_close(range);
        range_free(range);
    }
    return leave(CUDA_SUCCESS);
}

/* ---- modules and launches ---- */

static void blank_comments(char *text) {
    for (char *at = text; *at;) {
        if (at[0] == '/' && at[1] == '/') {
            while (*at && *at != '\n') *at++ = ' ';
        } else if (at[0] == '/' && at[1] == '*') {
            while (*at && !(at[0] == '*' && at[1] == '/')) *at++ = ' ';
            for (int i = 0; i < 2 && *at; i++) *at++ = ' ';
        } else {
            at++;
        }
    }
}

/* The bytes of a parameter, such as `.param .u64 .ptr .global name` or `.param .align 8 .b8 name[16]`. 0: it can't be
   told. */
static unsigned size_of_parameter(const char *text, const char *end) {
    unsigned bits = 0, times = 1;
    for (const char *at = text; at < end; at++) {
        if (!bits && at[0] == '.' && strchr("usbf", at[1])) {
            unsigned number = 0;
            if (sscanf(at + 2, "%u", &number) == 1) bits = number;
        }
        if (*at == '[') sscanf(at + 1, "%u", &times);
    }
    return bits / 8 * times;
}

static bool parse_parameters(CUfunction function, const char *text) {
    text += strspn(text, " \t\r\n");
    if (*text != '(') return true; /* none */
    const char *end = strchr(text, ')');
    if (!end) return false;
    for (const char *at = text + 1; at < end;) {
        const char *stop = memchr(at, ',', (size_t)(end - at));
        if (!stop) stop = end;
        if (strspn(at, " \t\r\n") < (size_t)(stop - at)) {
            if (function->num_params == MAX_PARAMS) return false;
            unsigned size = size_of_parameter(at, stop);
            if (!size) return false;
            function->sizes[function->num_params++] = size;
        }
        at = stop + 1;
    }
    return true;
}

static CUresult module_new(CUmodule *result, const void *image) {
    if (!result || !image) return CUDA_ERROR_INVALID_VALUE;
    if (!memcmp(image, "\177ELF", 4)) return CUDA_ERROR_NO_BINARY_FOR_GPU;
    char *text = strdup(image), *at;
    if (!text) abort();
    blank_comments(text);
    bool ok = !strncmp(text + strspn(text, " \t\r\n"), ".version", 8) && strstr(text, ".target") &&
              strstr(text, ".address_size");
    CUmodule module = made(sizeof *module);
    module->context = current;
    module->next = modules;
    modules = module;
    for (at = text; ok && (at = strstr(at, ".visible"));) {
        at += 8;
        at += strspn(at, " \t\r\n");
        if (strncmp(at, ".entry", 6)) continue;
        CUfunction function = made(sizeof *function);
        int length = 0;
        function->next = module->functions;
        module->functions = function;
        function->module = module;
        ok = sscanf(at + 6, " %127[A-Za-z0-9_$]%n", function->name, &length) == 1 &&
             parse_parameters(function, at + 6 + length);
    }
    free(text);
    if (!ok) {
        module_free(module);
        return CUDA_ERROR_INVALID_PTX;
    }
    *result = module;
    return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    ENTER(CONTEXT);
    return leave(module_new(module, image));
}

CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int num_options, CUjit_option *options,
                            void **values) {
    ENTER(CONTEXT);
    LEAVE_IF(num_options && (!options || !values), CUDA_ERROR_INVALID_VALUE); /* what they say is the compiler's */
    return leave(module_new(module, image));
}

static CUmodule module_of(CUmodule module) {
    CUmodule it = modules;
    while (it && it != module) it = it->next;
    return it;
}

CUresult cuModuleUnload(CUmodule module) {
    ENTER(CONTEXT);
    LEAVE_IF(!module_of(module), CUDA_ERROR_INVALID_HANDLE);
    module_free(module);
    return leave(CUDA_SUCCESS);
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    ENTER(CONTEXT);
    LEAVE_IF(!function || !name, CUDA_ERROR_INVALID_VALUE);
    LEAVE_IF(!module_of(module), CUDA_ERROR_INVALID_HANDLE);
    CUfunction it = module->functions;
    while (it && strcmp(it->name, name)) it = it->next;
    LEAVE_IF(!it, CUDA_ERROR_NOT_FOUND);
    *function = it;
    return leave(CUDA_SUCCESS);
}

static bool is_function(CUfunction function) {
    for (CUmodule module = modules; module; module = module->next)
        for (CUfunction each = module->functions; each; each = each->next)
            if (each == function) return true;
    return false;
}

/* A launch's arguments, which are read during the call. */
static bool read_arguments(CUfunction function, void **params, void **extra, uint64_t *arguments) {
    const char *buffer = NULL;
    size_t size = 0, at = 0;
    if (params && extra) return false;
    for (void **each = extra; each && *each != CU_LAUNCH_PARAM_END; each += 2) {
        if (each[0] == CU_LAUNCH_PARAM_BUFFER_POINTER)
            buffer = each[1];
        else if (each[0] == CU_LAUNCH_PARAM_BUFFER_SIZE)
            size = *(size_t *)each[1];
        else
            return false;
    }
    for (unsigned i = 0; i < function->num_params; i++) {
        if (params && params[i])
            memcpy(&arguments[i], params[i], 8);
        else if (buffer && at + 8 <= size)
            memcpy(&arguments[i], buffer + at, 8);
        else
            return false;
        at += 8;
    }
    return true;
}

CUresult cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                        unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared_bytes,
                        CUstream stream, void **params, void **extra) {
    ENTER(CONTEXT);
    stream = stream_of(stream);
    LEAVE_IF(!stream || !is_function(function) || function->module->context != stream->context,
             CUDA_ERROR_INVALID_HANDLE);
    LEAVE_IF(!grid_x || !grid_y || !grid_z || grid_x > 2147483647 || grid_y > 65535 || grid_z > 65535,
             CUDA_ERROR_INVALID_VALUE);
    LEAVE_IF(!block_x || !block_y || !block_z || block_z > 64 || shared_bytes > 49152, CUDA_ERROR_INVALID_VALUE);
    LEAVE_IF((uint64_t)block_x * block_y * block_z > 1024, CUDA_ERROR_INVALID_VALUE);
    const Kernel *kernel = kernel_of(function->name);
    LEAVE_IF(!kernel, CUDA_ERROR_NOT_SUPPORTED);
    LEAVE_IF(kernel->num_params != function->num_params, CUDA_ERROR_INVALID_IMAGE); /* not the kernel that we know */
    for (unsigned i = 0; i < function->num_params; i++) LEAVE_IF(function->sizes[i] != 8, CUDA_ERROR_INVALID_IMAGE);
    uint64_t arguments[MAX_PARAMS] = {0};
    LEAVE_IF(!read_arguments(function, params, extra, arguments), CUDA_ERROR_INVALID_VALUE);
    Operation *it = operation(KERNEL, 0);
    it->kernel = kernel;
    memcpy(it->arguments, arguments, sizeof arguments);
    enqueue(stream, it);
    return leave(CUDA_SUCCESS);
}

CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *data) {
    ENTER(CONTEXT);
    stream = stream_of(stream);
    LEAVE_IF(!stream, CUDA_ERROR_INVALID_HANDLE);
    LEAVE_IF(!function, CUDA_ERROR_INVALID_VALUE);
    Operation *it = operation(HOST_FUNCTION, 0);
    it->function = function;
    it->data = data;
    enqueue(stream, it);
    return leave(CUDA_SUCCESS);
}
