/* SPDX-License-Identifier: MIT */
/* The version stands in one place, the public header; daemon and library are released together. */
#ifndef HRD_VERSION_H
#define HRD_VERSION_H

#include "client/hclient.h"

#define HRD_STRING_(x) #x
#define HRD_STRING(x) HRD_STRING_(x)
#define HRD_VERSION           \
    HRD_STRING(HCLIENT_MAJOR) \
    "." HRD_STRING(HCLIENT_MINOR) "." HRD_STRING(HCLIENT_PATCH)

#endif
