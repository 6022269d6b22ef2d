/* Preloaded into programs that bind every interface and have no option for it: a bind of the wildcard address
 * becomes one of the loopback address, IPv4 and IPv6. Everything else is the C library's.
 * With LOOPBACK_MAPPED the wildcard of IPv6 becomes ::ffff:127.0.0.1, for programs that dial their own by IPv4. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

int bind(int fd, const struct sockaddr *address, socklen_t size) {
    int (*libc_bind)(int, const struct sockaddr *, socklen_t) = dlsym(RTLD_NEXT, "bind");
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
    } mine;
    if (size > sizeof mine) return libc_bind(fd, address, size);
    memcpy(&mine, address, size);
    if (mine.any.sa_family == AF_INET && mine.v4.sin_addr.s_addr == htonl(INADDR_ANY))
        mine.v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    else if (mine.any.sa_family == AF_INET6 && IN6_IS_ADDR_UNSPECIFIED(&mine.v6.sin6_addr))
        inet_pton(AF_INET6, getenv("LOOPBACK_MAPPED") ? "::ffff:127.0.0.1" : "::1", &mine.v6.sin6_addr);
    return libc_bind(fd, &mine.any, size);
}
