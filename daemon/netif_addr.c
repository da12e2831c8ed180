/* SPDX-License-Identifier: MIT */
/* Addresses: text, comparison, sockaddr. */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>

#include "daemon/netif.h"

int hrd_addr_parse(const char *text, uint16_t port, struct hrp_addr *out)
{
    struct hrp_addr a = {.port = port};
    char buf[64];
    size_t len = strlen(text);
    if (len >= sizeof(buf))
        return -EINVAL;
    memcpy(buf, text, len + 1);
    char *scope = strchr(buf, '%');
    if (scope)
        *scope++ = 0;
    if (!scope && inet_pton(AF_INET, buf, a.ip) == 1) {
        a.family = 4;
    } else if (inet_pton(AF_INET6, buf, a.ip) == 1) {
        a.family = 6;
        if (scope && (a.scope_id = if_nametoindex(scope)) == 0)
            return -EINVAL;
    } else {
        return -EINVAL;
    }
    *out = a;
    return 0;
}

const char *hrd_addr_text(const struct hrp_addr *a, char *buf, size_t len)
{
    char ip[INET6_ADDRSTRLEN] = "?";
    char name[IF_NAMESIZE];
    inet_ntop(a->family == 6 ? AF_INET6 : AF_INET, a->ip, ip, sizeof(ip));
    if (a->family == 6 && a->scope_id != 0 && if_indextoname(a->scope_id, name))
        snprintf(buf, len, "%s%%%s", ip, name);
    else
        snprintf(buf, len, "%s", ip);
    return buf;
}

const char *hrd_addr_port_text(const struct hrp_addr *a, char *buf, size_t len)
{
    char ip[HRD_ADDR_TEXT];
    snprintf(buf, len, "%s port %u", hrd_addr_text(a, ip, sizeof(ip)), a->port);
    return buf;
}

bool hrd_addr_same_ip(const struct hrp_addr *a, const struct hrp_addr *b)
{
    return a->family == b->family && memcmp(a->ip, b->ip, a->family == 4 ? 4 : 16) == 0;
}

bool hrd_addr_is_loopback(const struct hrp_addr *a)
{
    static const uint8_t one[16] = {[15] = 1};
    return a->family == 4 ? a->ip[0] == 127 : memcmp(a->ip, one, 16) == 0;
}

bool hrd_addr_is_any(const struct hrp_addr *a)
{
    static const uint8_t zero[16];
    return memcmp(a->ip, zero, a->family == 4 ? 4 : 16) == 0;
}

bool hrd_addr_is_link_local(const struct hrp_addr *a)
{
    if (a->family == 4)
        return a->ip[0] == 169 && a->ip[1] == 254;
    return a->ip[0] == 0xfe && (a->ip[1] & 0xc0) == 0x80;
}

socklen_t hrd_addr_to_sockaddr(const struct hrp_addr *a, struct sockaddr_storage *ss)
{
    memset(ss, 0, sizeof(*ss));
    if (a->family == 4) {
        struct sockaddr_in *in = (struct sockaddr_in *)ss;
        in->sin_family = AF_INET;
        in->sin_port = htons(a->port);
        memcpy(&in->sin_addr, a->ip, 4);
        return sizeof(*in);
    }
    struct sockaddr_in6 *in6 = (struct sockaddr_in6 *)ss;
    in6->sin6_family = AF_INET6;
    in6->sin6_port = htons(a->port);
    in6->sin6_scope_id = hrd_addr_is_link_local(a) ? a->scope_id : 0;
    memcpy(&in6->sin6_addr, a->ip, 16);
    return sizeof(*in6);
}

int hrd_addr_from_sockaddr(const struct sockaddr *sa, struct hrp_addr *out)
{
    struct hrp_addr a = {0};
    if (sa->sa_family == AF_INET) {
        const struct sockaddr_in *in = (const struct sockaddr_in *)(const void *)sa;
        a.family = 4;
        a.port = ntohs(in->sin_port);
        memcpy(a.ip, &in->sin_addr, 4);
    } else if (sa->sa_family == AF_INET6) {
        const struct sockaddr_in6 *in6 = (const struct sockaddr_in6 *)(const void *)sa;
        a.port = ntohs(in6->sin6_port);
        if (IN6_IS_ADDR_V4MAPPED(&in6->sin6_addr)) {
            a.family = 4;
            memcpy(a.ip, (const char *)&in6->sin6_addr + 12, 4);
        } else {
            a.family = 6;
            a.scope_id = in6->sin6_scope_id;
            memcpy(a.ip, &in6->sin6_addr, 16);
        }
    } else {
        return -EAFNOSUPPORT;
    }
    *out = a;
    return 0;
}
